"""A pass key hidden in a stored book is found and read; ``bench/passkey.py`` measures the same at length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import passkey
import pytest
import torch
from splice import splice

import memstore
from memstore.memory import Memory
from memstore.registry import adapter_for
from memstore.store import MemoryStore

pytestmark = pytest.mark.real

LENGTH = 2304


@pytest.fixture(scope="module")
def reader() -> passkey.Reader:
    return passkey.load()


@pytest.fixture(scope="module")
def library(reader: passkey.Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MemoryStore, Memory]]:
    path: Path = tmp_path_factory.mktemp("passkey") / "store"
    with memstore.open(path) as store:
        ids = passkey.filler_ids(reader.tokenizer, LENGTH)
        yield store, store.encode(reader.model, reader.tokenizer, input_ids=ids, name="filler", dtype="float16")


def test_a_spliced_memory_equals_a_fully_encoded_one(reader: passkey.Reader, library: Any) -> None:
    store, filler = library
    _, _, ids = passkey.hide(random.Random(5), reader.tokenizer, filler.token_ids)
    spliced = splice(adapter_for(reader.model)(reader.model), filler, ids, "spliced")
    full = store.encode(reader.model, reader.tokenizer, input_ids=ids, name="full", dtype="float16")
    with spliced.open("open") as changed, full.open() as wanted:
        for part, spec in full.manifest.parts.items():
            rows = spec.num_rows(LENGTH)
            assert torch.equal(changed.rows(part, 0, rows), wanted.rows(part, 0, rows)), part


def test_the_key_is_among_what_was_chosen_and_in_the_answer(reader: passkey.Reader, library: Any) -> None:
    _, filler = library
    rng = random.Random(1)
    assert filler.token_ids is not None
    hidden = [passkey.hide(rng, reader.tokenizer, filler.token_ids) for _ in range(3)]
    trials = [passkey.trial(reader, filler, LENGTH, each, f"trial-{i}") for i, each in enumerate(hidden)]
    assert all(trial.chosen for trial in trials)
    right, pasted = (
        sum(trial.key in answer for trial, answer in zip(trials, answers, strict=True))
        for answers in (
            [trial.memory for trial in trials],
            [trial.pasted for trial in trials],
        )
    )
    assert right >= pasted > 0
