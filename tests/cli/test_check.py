"""``memstore check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import ReadOnlyStoreError
from memstore.query_sample import FILE
from tests import kept, tiny
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")


def decisive() -> Any:
    """The tiny model, but its attention is not as flat as random weights make it: some keys matter."""
    llama = tiny.llama()
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.q_proj.weight.mul_(10)
            layer.self_attn.k_proj.weight.mul_(10)
    return llama


@pytest.fixture
def arguments(library: Path, tmp_path: Path) -> list[object]:
    """Check the memory ``letters`` of a library, of which the index ``kept`` is built."""
    llama, tokenizer = decisive(), tiny.tokenizer()
    llama.save_pretrained(tmp_path / "decisive")
    tokenizer.save_pretrained(tmp_path / "decisive")
    with memstore.open(library) as store:
        store.encode(llama, tokenizer, "".join(chr(97 + i * i * i % 26) for i in range(600)), name="letters")
        store.reindex("letters", "kept")
    return ["check", "letters", "--model", tmp_path / "decisive", "--store", library, "--top-k", 20]


def test_the_document_is_that_of_the_library(run: Run, arguments: list[object], library: Path) -> None:
    done = run(*arguments, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0
    with memstore.open(library) as store:
        expected = store.check("letters", decisive(), k=20).model_dump(mode="json")
    for numbers in (document, expected):  # time is another every time
        for each in (numbers["total"], *numbers["layers"]):
            assert each.pop("wall_us") > 0 and each.pop("cpu_us") > 0
    assert document == expected
    assert document["backend"] == "exact" and document["total"]["recall"] == 1 and len(document["layers"]) == 2


def test_a_table_and_what_it_means(run: Run, arguments: list[object], library: Path) -> None:
    done = run(*arguments)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("letters: exact; the best 20 of 600 keys for each of 1,024 queries")
    assert lines[1].split()[:4] == ["layer", "recall@20", "mass", "exact"]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "total"] and lines[4].split()[1] == "1.0000"
    assert "The index keeps 100.00% of that, and finds 100.0% of the same keys." in done.stdout
    assert list(library.glob(f"memories/*/{FILE}"))  # the sample is kept for the next time


def test_tuning_stores_what_reaches_the_target(run: Run, arguments: list[object], library: Path) -> None:
    done = run(*arguments, "--backend", "kept", "--tune", "--target-mass", "0.99")
    assert done.exit_code == 0
    assert "Tried step 4: keeps " in done.stdout and "Stored step 1: the cheapest that keeps 99.00%." in done.stdout
    with memstore.open(library, "r") as store:
        assert [record.tuned for record in store.indexes("letters")] == [{"step": 1}]
    assert json.loads(run("show", "letters", "--store", library, "--json").stdout)["indexes"][0]["tuned"] == {"step": 1}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_target_that_nothing_reaches_is_a_failure_that_names_the_best(
    run: Run, arguments: list[object], library: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    monkeypatch.setattr(kept.KeptIndex, "tunable", {"step": (4, 2)})
    done = run(*arguments, "--backend", "kept", "--tune", *form)
    assert done.exit_code == 1
    error = " ".join(done.stderr.split())
    assert "No setting keeps 99.00% of the attention mass" in error and "The best, step 2, keeps " in error
    if form:
        tuning = json.loads(done.stdout)["tuning"]
        assert (tuning["reached"], tuning["options"]) == (False, {"step": 2})
    with memstore.open(library, "r") as store:
        assert [record.tuned for record in store.indexes("letters")] == [{"step": 2}]


def test_nothing_to_tune(run: Run, arguments: list[object]) -> None:
    done = run(*arguments, "--tune")
    assert done.exit_code == 0
    assert "The backend 'exact' has nothing to tune." in done.stdout and "Stored" not in done.stdout


@pytest.mark.parametrize(
    "wrong", [["--target-mass", "0.9"], ["--tune", "--target-mass", "0"], ["--top-k", "0"]], ids=str
)
def test_wrong_usage(run: Run, arguments: list[object], wrong: list[str]) -> None:
    assert run(*arguments, *wrong).exit_code == 2


def test_a_wrong_name_is_told_before_a_model_is_loaded(run: Run, library: Path) -> None:
    done = run("check", "exodus", "--model", "no-such-model", "--store", library, "--json")
    assert done.exit_code == 1 and "no memory named 'exodus'" in json.loads(done.stdout)["error"]


def test_a_store_that_cannot_be_written_is_checked_all_the_same(
    run: Run, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store = memstore.open

    def closed(path: Path, mode: str, **options: str) -> object:
        if mode == "a":
            raise ReadOnlyStoreError("cannot be written")
        return open_store(path, "r", **options)

    monkeypatch.setattr(memstore, "open", closed)
    assert json.loads(run(*arguments, "--json").stdout)["total"]["recall"] == 1
    done = run(*arguments, "--tune")
    assert done.exit_code == 1 and "cannot be written" in done.stderr
