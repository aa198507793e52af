"""Whatever happens to a byte of a store: the right answer, or an error that says which memory it is and what to do.

Never a crash, never a wrong answer. 2,030 mutations in the test run, ten times as many with ``--full``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import memstore
from memstore import config, describe, registry
from memstore.errors import ConfigError, DamagedMemoryError, FormatError, IndexNotice, MemstoreError
from memstore.indexes import open_index, reindex
from memstore.interfaces import Mode
from memstore.query_sample import query_sample
from memstore.registry import adapter_for
from memstore.store import MemoryStore
from memstore.verify import check
from tests.faults import forked
from tests.faults.mutations import KINDS, mutated
from tests.models import build, tokens
from tests.store.making import contents

BACKEND = "hnsw"
WAYS_OUT = ("read its document again", "encode its document again", "Restore", "restore")
# Files of a store, as patterns, with the mutations of the test run and whether it is open already when they happen.
TARGETS = {
    "catalog": ("catalog/data.mdb", 400, False),
    "open catalog": ("catalog/data.mdb", 100, True),
    "lock": ("catalog/lock.mdb", 150, False),
    "memory": ("memories/*/data.mdb", 500, False),
    "open memory": ("memories/*/data.mdb", 130, True),
    "index": ("memories/*/indexes/*/*", 250, False),
    "queries": ("memories/*/queries.safetensors", 100, False),
}
PENDING, CONFIGURATION = 150, 250
CONFIGURED = """\
# Which index searches, and where the store lies.
profile = "gpu"

[store]
path = "library"
records = "lmdb"

[index]
backend = "faiss-ivf"
options = { nlist = 64, nprobe = 8 }

[profiles.gpu.index]
backend = "hnsw"
options = { m = 8 }
"""


class Case(NamedTuple):
    target: str
    seed: int


class Template(NamedTuple):
    """A store whose every byte is known, with models that read it."""

    path: Path
    contents: dict[str, dict[bytes, bytes]]
    found: torch.Tensor
    queries: torch.Tensor
    model: Any
    sample: dict[int, torch.Tensor]
    job: dict[bytes, bytes]


def interrupted(store: MemoryStore, model: Any) -> None:
    """Leave three of four blocks of a memory."""

    def stop(done: int, total: int) -> None:
        if done >= 768:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        store.encode(model, input_ids=tokens(1000), name="job", progress=stop)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    path = tmp_path_factory.mktemp("template") / "library"
    bart, llama = build("bart"), build("llama")
    with pytest.MonkeyPatch.context() as patch, memstore.open(path) as store:
        patch.setattr(registry, "entries", functools.cache(registry.entries))  # which takes longer than all else here
        patch.setattr(describe, "BLOCK_BYTES", 1)  # blocks of 256 tokens
        for name, model, length in (("gone", bart, 40), ("esther", bart, 600), ("ruth", llama, 300)):
            store.encode(model, input_ids=tokens(length), name=name, metadata={"author": "unknown"})
        del store["gone"]
        reindex(store["esther"], BACKEND)
        queries = torch.randn(4, bart.config.d_model, generator=torch.Generator().manual_seed(0))
        with store["esther"].open() as opened:
            sample = query_sample(opened, adapter_for(bart)(bart))
            found = open_index(opened, BACKEND).indexes["hidden"].search(queries, 5)[1]
        interrupted(store, bart)
        known = {name: contents(store[name]) for name in store}
        store.close()
        with memstore.open(tmp_path_factory.mktemp("whole") / "library") as whole:
            job = contents(whole.encode(bart, input_ids=tokens(1000), name="job"))
        yield Template(path, known, found, queries, bart, sample, job)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder, in memory where that can be had: a store is copied for every case."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def told(error: MemstoreError, *names: str) -> str:
    """The kind of an error whose message is as it has to be."""
    text = str(error)
    assert any(name in text for name in names), f"names none of {names}: {text}"
    assert any(way in text for way in WAYS_OUT), f"names no way out: {text}"
    return type(error).__name__


def read(store: MemoryStore, name: str, template: Template, verify: Any, indexed: bool) -> str:
    """Read all of a memory and its index. "ok", or the kind of the error."""
    try:
        memory = store[name]
        found = contents(memory, verify)
    except (DamagedMemoryError, FormatError) as error:
        return told(error, repr(name))
    assert found == template.contents[name], "other bytes than were written"
    assert memory.metadata == {"author": "unknown"}
    if name == "esther" and indexed:
        with memory.open() as opened:
            index = open_index(opened, BACKEND).indexes["hidden"]
            assert torch.equal(index.search(template.queries, 5)[1], template.found), "other rows than before"
            sample = query_sample(opened, adapter_for(template.model)(template.model))
            assert all(torch.equal(sample[layer], rows) for layer, rows in template.sample.items()), "another sample"
    return "ok"


def check_case(case: Case, template: Template, scratch: Path) -> str:
    chance = random.Random(f"{case.target} {case.seed}")
    pattern, _, is_open = TARGETS[case.target]
    path = scratch / f"{case.target} {case.seed}"
    shutil.copytree(template.path, path)
    victim = chance.choice(sorted(path.glob(pattern)))
    kind = KINDS[case.seed % len(KINDS)]
    before = victim.read_bytes()
    after = mutated(before, kind, chance)

    def damage() -> None:
        with victim.open("r+b") as file:  # the same file, as whoever has it open sees it
            file.write(after)
            file.truncate(len(after))

    if not is_open:
        damage()
    modes: tuple[Mode, ...] = ("a", "r")
    mode = chance.choice(modes)
    indexed = case.target in ("index", "queries") or case.seed % 7 == 0
    said: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IndexNotice)
        try:
            with memstore.open(path, mode) as store:
                if is_open:
                    store.names()
                    held = [memory.open() for memory in store.memories()]
                    damage()
                try:
                    names = store.names()
                    assert names == sorted(template.contents), names
                    said["names"] += 1
                except (DamagedMemoryError, FormatError) as error:
                    said[told(error, "catalog", "memory")] += 1
                for name in template.contents:
                    outcome = read(store, name, template, chance.choice(("open", "lazy")), indexed)
                    said[outcome] += 1
                    if outcome == "ok":
                        assert check(store[name]) == [], "verify finds damage in what reads equal"
                    elif name in store:
                        assert check(store[name]), "verify finds nothing"
                if is_open:
                    for opened in held:
                        with contextlib.suppress(DamagedMemoryError):
                            for key in opened.keys:
                                assert opened.value(key).tobytes() == template.contents[opened.memory.name][key]
                        opened.close()
        except (DamagedMemoryError, FormatError) as error:
            said[told(error, str(path))] += 1
    shutil.rmtree(path)
    return " ".join(sorted(said))


def check_pending(seed: int, template: Template, scratch: Path) -> str:
    """An encoding that goes on over damage ends with the bytes that it would have had."""
    chance, path = random.Random(f"pending {seed}"), scratch / f"pending {seed}"
    shutil.copytree(template.path, path)
    complete = {"esther", "ruth"}
    with memstore.open(path, "r") as store:
        known = {store[name].manifest.id for name in complete}
    (victim,) = [data for data in path.glob("memories/*/data.mdb") if data.parent.name not in known]
    victim.write_bytes(mutated(victim.read_bytes(), KINDS[seed % len(KINDS)], chance))
    with memstore.open(path) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(describe, "BLOCK_BYTES", 1)
        done: list[int] = []
        memory = store.encode(
            template.model, input_ids=tokens(1000), name="job", progress=lambda now, total: done.append(now)
        )
        assert contents(memory) == template.job, "other bytes than an encoding without interruption gives"
        assert store.names() == ["esther", "job", "ruth"]
    shutil.rmtree(path)
    return f"went on after {done[0]}"


def test_an_encoding_goes_on_over_damage_to_what_it_had_done(template: Template, scratch: Path, times: int) -> None:
    answers, failures = forked.run(range(times * PENDING), lambda seed: check_pending(seed, template, scratch))
    print(Counter(answers))
    assert not failures, few(failures)
    assert {"went on after 0", "went on after 768"} <= set(answers)


def check_configuration(seed: int, folder: Path) -> str:
    chance, path = random.Random(f"configuration {seed}"), folder / "plugins.toml"
    text = CONFIGURED.encode()
    path.write_bytes(mutated(text, KINDS[seed % len(KINDS)], chance))
    try:
        settings = config.load(folder, {}).settings
    except ConfigError as error:
        return "ConfigError" if str(path) in str(error) else f"!names no file: {error}"
    assert settings.store.records and settings.index.backend  # all that is asked of it is there
    return "ok"


def test_a_damaged_configuration_is_another_or_an_error(user_directory: Path, tmp_path: Path, times: int) -> None:
    answers, failures = forked.run(range(times * CONFIGURATION), lambda seed: check_configuration(seed, tmp_path))
    print(Counter(answers))
    assert not failures, few(failures)
    assert Counter(answers)["ConfigError"] > len(answers) / 2


def few(failures: list[forked.Failure]) -> str:
    return f"{len(failures)} failed:\n" + "\n".join(f"{case}: {what}" for case, what in failures[:5])


@pytest.mark.parametrize("target", TARGETS)
def test_a_store_with_a_damaged_file_is_right_or_says_so(
    template: Template, scratch: Path, target: str, times: int
) -> None:
    cases = [Case(target, seed) for seed in range(times * TARGETS[target][1])]
    answers, failures = forked.run(cases, lambda case: check_case(case, template, scratch))
    print(Counter(answers))
    assert not failures, few(failures)
    noticed = sum("Error" in answer for answer in answers)
    if target in ("catalog", "memory"):
        assert noticed > len(cases) / 4
    if target in ("lock", "index", "queries"):
        assert noticed == 0  # none of them is needed: they are made anew
