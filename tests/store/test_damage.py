"""Bytes that change on disk are noticed: never a crash, never a wrong value.

The work is done in other processes, so that a crash fails one test and not the run.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import memstore
from memstore import verify as verifying
from memstore.errors import MEND, DamagedMemoryError, MemoryNotFoundError, StoreError
from memstore.store import MemoryStore
from memstore.values import block_key, describe, prefix_key
from tests.faults.harming import damage
from tests.store import making

# argv: store, seed, number of cases. Each case damages the file, reads all of it, and repairs the file.
DAMAGE_A_MEMORY = """
import random, sys
from collections import Counter
from pathlib import Path
import memstore
from memstore.errors import MEND, DamagedMemoryError
from memstore.values import CHECKSUM
from tests.store import making

path, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
data = next(path.glob("memories/*/data.mdb"))
whole = data.read_bytes()
pages = [n for n in range(0, len(whole), 4096)]
chance, seen = random.Random(seed), Counter()
for case in range(cases):
    damaged = bytearray(whole)
    kind = ("flip", "flip", "header", "page", "swap", "cut", "extend")[case % 7]
    if kind == "flip":
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    elif kind == "header":
        damaged[chance.choice(pages) + chance.randrange(64)] = chance.randrange(256)
    elif kind == "page":
        start = chance.choice(pages)
        damaged[start : start + 4096] = chance.randbytes(4096)
    elif kind == "swap":
        a, b = chance.sample(pages, 2)
        damaged[a : a + 4096], damaged[b : b + 4096] = whole[b : b + 4096], whole[a : a + 4096]
    elif kind == "cut":
        del damaged[chance.randrange(len(damaged)) :]
    else:
        damaged += bytes(chance.randrange(1, 9000))
    data.write_bytes(damaged)
    with memstore.open(path, "r") as library:
        try:
            making.check(library["esther"], "open")
            seen[kind, "equal"] += 1
            assert kind not in ("cut", "extend") and len(damaged) == len(whole)
        except DamagedMemoryError as error:
            assert str(error).endswith(MEND), error
            seen[kind, "noticed"] += 1
data.write_bytes(whole)
with memstore.open(path, "r") as library:
    making.check(library["esther"], "open")
print(dict(seen))
assert all(seen[kind, "noticed"] for kind in ("flip", "header", "page", "swap", "cut", "extend"))
"""

DAMAGE_THE_CATALOG = """
import random, shutil, sys
from collections import Counter
from pathlib import Path
import memstore
from memstore.errors import DamagedMemoryError, FormatError, StoreError
from tests.store import making

path, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
data = path / "catalog" / "data.mdb"
whole = data.read_bytes()
folders = sorted(path.glob("memories/*"))
chance, seen = random.Random(seed), Counter()
for case in range(cases):
    damaged = bytearray(whole)
    kind = ("flip", "header", "page", "cut", "garbage", "zero")[case % 6]
    if kind == "flip":
        damaged[chance.randrange(8192, len(damaged))] ^= 1 << chance.randrange(8)
    elif kind == "header":
        damaged[chance.randrange(2, len(whole) // 4096) * 4096 + chance.randrange(64)] = chance.randrange(256)
    elif kind == "page":
        start = chance.randrange(len(whole) // 4096) * 4096
        damaged[start : start + 4096] = chance.randbytes(4096)
    elif kind == "cut":
        del damaged[chance.randrange(len(damaged)) :]
    elif kind == "garbage":
        damaged = bytearray(chance.randbytes(len(whole)))
    else:
        damaged = bytearray(chance.choice((0, len(whole))))
    data.write_bytes(damaged)
    try:
        mode = chance.choice("ar")
        with memstore.open(path, mode) as library:
            names = library.names()
            assert names == ["esther", "ruth"], names
            for name in names:
                making.check(library[name], "open")
            if mode == "a":  # which needs more of the file to be sound
                assert library.records.commit({b"x": b"y"})
                assert library.names() == names
        seen[kind, "equal"] += 1
    except (DamagedMemoryError, FormatError) as error:
        assert "copy" in str(error) or "Restore" in str(error), error
        seen[kind, "noticed"] += 1
    assert sorted(path.glob("memories/*")) == folders
    (path / "catalog" / "lock.mdb").unlink(missing_ok=True)
data.write_bytes(whole)
with memstore.open(path) as library:
    for name in library:
        making.check(library[name], "open")
print(dict(seen))
assert all(seen[kind, "noticed"] for kind in ("header", "page", "cut", "garbage", "zero"))
"""


def flip(data: Path, position: int) -> None:
    with data.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def data_of(library: MemoryStore, name: str = "esther") -> Path:
    return library.path / "memories" / library[name].manifest.id / "data.mdb"


def damage_a_value(library: MemoryStore, name: str = "esther") -> None:
    """Flip a bit inside block 1 of "large"."""
    data = data_of(library, name)
    value = making.rows("large", 64, 128).tobytes()
    flip(data, data.read_bytes().index(value) + 5000)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_memory_is_noticed_or_reads_equal(library: MemoryStore, seed: int) -> None:
    making.write(library)
    library.close()
    print(making.in_child(DAMAGE_A_MEMORY, library.path, seed, 105))


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_catalog_is_noticed_or_reads_equal(library: MemoryStore, seed: int) -> None:
    for name in ("esther", "gone", "ruth"):
        making.write(library, name)
    del library["gone"]
    library.close()
    print(making.in_child(DAMAGE_THE_CATALOG, library.path, seed, 72))


def test_lazy_verification_notices_a_damaged_value_when_it_is_touched(library: MemoryStore) -> None:
    making.write(library)
    damage_a_value(library)
    memory = library["esther"]
    with memory.open("lazy") as opened:
        opened.block("large", 0)
        opened.block("small", 1)
        for _ in range(2):
            with pytest.raises(DamagedMemoryError, match="'esther'"):
                opened.block("large", 1)
        with pytest.raises(DamagedMemoryError):
            opened.blocks("large")
        with pytest.raises(DamagedMemoryError):
            opened.rows("large", 100, 200)
    with pytest.raises(DamagedMemoryError):
        memory.open("open")
    with memory.open("off") as opened:
        opened.block("large", 1)
    library.close()  # the opening that failed has left nothing open


def test_a_copy_of_a_store_is_verified_anew(library: MemoryStore, tmp_path: Path) -> None:
    making.check(making.write(library))
    shutil.copytree(library.path, tmp_path / "copy")
    with memstore.open(tmp_path / "copy") as copy:
        damage_a_value(copy)
        with pytest.raises(DamagedMemoryError):
            making.check(copy["esther"])
    making.check(library["esther"])


def test_a_missing_file_is_damage_and_the_memory_can_be_removed(library: MemoryStore) -> None:
    making.write(library)
    shutil.rmtree(data_of(library).parent)
    with pytest.raises(DamagedMemoryError, match="missing"):
        library["esther"].open()
    del library["esther"]
    assert library.names() == []


def test_a_damaged_manifest_costs_only_its_memory(library: MemoryStore) -> None:
    for name in ("esther", "ruth"):
        making.write(library, name)
    library.close()
    catalog = library.path / "catalog" / "data.mdb"
    whole = catalog.read_bytes()
    position = -1
    while (position := whole.find(b"esther", position + 1)) != -1:  # freed pages may hold older copies
        flip(catalog, position)
    with memstore.open(library.path) as again:
        making.check(again["ruth"], "open")
        with pytest.raises(DamagedMemoryError, match="record of the catalog"):
            again["esther"]
        with pytest.raises(DamagedMemoryError, match="record of the catalog"):
            again.names()
        del again["esther"]
        assert again.names() == ["ruth"]
        with pytest.raises(MemoryNotFoundError):
            again["esther"]
        making.check(making.write(again, "esther"), "open")


def test_a_lost_catalog_does_not_cost_the_memories(library: MemoryStore) -> None:
    making.write(library)
    folders = list(library.path.glob("memories/*"))
    library.close()
    (library.path / "catalog" / "data.mdb").unlink()
    for mode in ("a", "r"):
        with pytest.raises(DamagedMemoryError, match="missing.*verify --repair"):
            memstore.open(library.path, mode)
    assert list(library.path.glob("memories/*")) == folders


def test_verify_reports_each_memory(library: MemoryStore) -> None:
    for name in ("a", "b", "c"):
        making.write(library, name)
    damage_a_value(library, "b")
    os.truncate(data_of(library, "c"), 8192)
    assert [(result.name, result.ok) for result in library.verify()] == [("a", True), ("b", False), ("c", False)]
    (result,) = library.verify("b")
    assert "differ from those written" in result.problems[0]
    assert library.verify("a")[0].problems == []
    with pytest.raises(MemoryNotFoundError):
        library.verify("d")


def test_a_name_that_is_missing_brings_the_nearest_to_mind(library: MemoryStore) -> None:
    making.write(library, "esther")
    with pytest.raises(MemoryNotFoundError, match="named 'ester'. Did you mean 'esther'"):
        library["ester"]
    with pytest.raises(MemoryNotFoundError, match=r"named 'job'\.$"):
        del library["job"]


def test_verify_notices_records_that_are_missing_or_not_those_sealed(library: MemoryStore) -> None:
    making.write(library)
    memory = making.write(library, "swapped", metadata={})
    other = library["esther"].manifest
    from memstore.catalog import SEALED, key

    for change in ({"digest": "0" * 32}, {"num_tokens": 400}):
        manifest = memory.manifest.model_copy(update=change)
        library.records.commit({key(SEALED, "swapped"): manifest.pack()})
        assert [result.ok for result in library.verify()] == [True, False]
    assert library["esther"].manifest == other


def test_a_crash_of_the_checking_process_is_reported_as_damage(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        making.write(library, name)
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, signal, mmap\nimport memstore.memory as m\nopen_ = m.Memory.open\n"
        "def crash(self, verify='lazy'):\n"
        "    if self.name == 'b': os.kill(os.getpid(), signal.SIGBUS)\n"
        "    return open_(self, verify)\n"
        "m.Memory.open = crash\n"
    )
    monkeypatch.syspath_prepend(folder)
    assert [result.ok for result in library.verify()] == [True, False, True]
    assert signal.SIGBUS.name in library.verify("b")[0].problems[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_changes_while_it_is_checked_is_not_damaged(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    for name in ("esther", "ruth", "tobit"):
        making.write(library, name)
    run = verifying._run

    def late(store: MemoryStore, ids: list[str]) -> Any:
        monkeypatch.setattr(verifying, "_run", run)
        done = run(store, ids) if when == "after" else None
        del library["esther"], library["ruth"]
        making.write(library, "ruth")
        return done or run(store, ids)

    monkeypatch.setattr(verifying, "_run", late)
    assert [(result.name, result.ok) for result in library.verify()] == [("ruth", True), ("tobit", True)]
    monkeypatch.setattr(verifying, "_run", late)
    making.write(library, "esther")
    assert [(result.name, result.ok) for result in library.verify(repair=True)] == [("ruth", True), ("tobit", True)]
    monkeypatch.setattr(verifying, "_run", late)
    making.write(library, "esther")
    with pytest.raises(MemoryNotFoundError):
        library.verify("esther")


def test_a_store_that_is_removed_while_it_is_checked_is_an_error_in_words(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    run = verifying._run

    def late(store: MemoryStore, ids: list[str]) -> Any:
        shutil.rmtree(library.path)
        return run(store, ids)

    monkeypatch.setattr(verifying, "_run", late)
    with pytest.raises(StoreError, match="There is no store at") as caught:
        library.verify()
    assert "Traceback" not in str(caught.value)


def test_a_checking_process_that_fails_is_an_error(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    making.write(library)
    monkeypatch.setattr(library, "backend", "unknown")
    with pytest.raises(StoreError, match="unknown"):
        library.verify()


def test_damage_is_told_in_words(library: MemoryStore) -> None:
    memory = making.write(library)
    damage(memory, block_key("large", 3))  # smaller values lie in the structure
    with pytest.raises(DamagedMemoryError) as caught, memory.open() as opened:
        opened.block("large", 3)
    what = "the bytes of block 3 of 'large' differ from those written"
    assert str(caught.value) == f"Memory 'esther' is damaged: {what}. {MEND}"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (block_key("keys.15", 258), "block 258 of 'keys.15'"),
        (prefix_key("keys.15"), "the prefix of 'keys.15'"),
        (b"dtext", "the text"),
        (b"dids", "the token ids"),
        (b"cdoffsets", "the checksum of the offsets"),
        (b"c" + block_key("a", 0), "the checksum of block 0 of 'a'"),
        (b"bad", "the record 'bad'"),
        (b"\xff", "the record '\ufffd'"),
        (b"", "the record ''"),
    ],
)
def test_a_key_has_words(key: bytes, words: str) -> None:
    assert describe(key) == words
