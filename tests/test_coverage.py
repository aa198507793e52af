"""How much of a question stands together at one place of the memories."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from memstore.errors import AttachError, FingerprintMismatchError
from memstore.reading.coverage import coverage
from tests import tiny
from tests.models import build, tokens


class Tokens(SimpleNamespace):
    """Stands for a memory, of which its tokens are all that is looked at."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def of_tokens(*documents: list[int]) -> list[Any]:
    return [Tokens(num_tokens=len(ids), token_ids=np.array(ids, np.int32)) for ids in documents]


def reckoned(documents: list[list[int]], asked: list[int]) -> float:
    """Block by block, with sets."""
    cut = [[set(ids[i : i + 64]) for i in range(0, len(ids), 64)] for ids in documents]
    blocks = [block for each in cut for block in each]
    weight = {}
    for token in set(asked):
        df = sum(token in block for block in blocks)
        weight[token] = math.log(1 + (len(blocks) - df + 0.5) / (df + 0.5))
    places = [a | b for each in cut for a, b in pairwise([*each, set()])]
    best = max(sum(weight[token] for token in weight if token in place) for place in places)
    return best / sum(weight.values()) if weight else 0.0


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=300), min_size=1, max_size=3),
    asked=st.lists(st.integers(0, 60), max_size=8),
)
def test_it_is_the_best_pair_of_blocks(documents: list[list[int]], asked: list[int]) -> None:
    found = coverage(of_tokens(*documents), asked)
    assert found == pytest.approx(reckoned(documents, asked), abs=1e-9) and 0 <= found <= 1


def test_words_count_together_and_only_where_they_are_near() -> None:
    filler = [0] * 64
    near, far = [*filler, *filler[1:], 1, 2, *filler[1:]], [1, *filler, *filler, *filler, 2, *filler[1:]]
    assert coverage(of_tokens(near), [1, 2]) == 1
    assert coverage(of_tokens(far), [1, 2]) == 0.5
    assert coverage(of_tokens(near), [1, 1, 3]) < 0.5  # a token that is nowhere is the rarest, and twice is once
    assert coverage(of_tokens(near[: 64 * 2], [2, *filler]), [1, 2]) == 0.5  # a pair of blocks is of one memory


def test_of_each_row_in_words(library: Any) -> None:
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    texts = {"one": "abc " * 40 + "In the beginning was the word.", "two": "0123456789" * 20}
    one, two = (library.encode(model, tokenizer, text, name=name, window=64) for name, text in texts.items())
    with memstore.attach(model, rows=[[one], [two], [one, two]]) as attached:
        found = attached.coverage("In the beginning", tokenizer=tokenizer)
        with pytest.raises(AttachError, match="one text"):
            attached.coverage(["In the beginning"], tokenizer=tokenizer)  # type: ignore[arg-type]
        with pytest.raises(AttachError, match="takes the model's tokenizer"):
            attached.coverage("In the beginning", tokenizer=None)  # type: ignore[arg-type]
    assert found[0] == found[2] == 1 and found[1] == 0
    assert attached.rows[0] == [one]
    with pytest.raises(AttachError, match="attached"):
        attached.coverage("In the beginning", tokenizer=tokenizer)


def test_it_takes_the_memorys_own_tokenizer_and_token_ids(library: Any) -> None:
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    memory = library.encode(model, tokenizer, "In the beginning was the word.", name="doc")
    other = tiny.tokenizer()
    other.add_tokens(["beginning"])
    with memstore.attach(model, memory) as attached, pytest.raises(FingerprintMismatchError, match="tokenizer"):
        attached.coverage("In the beginning", tokenizer=other)
    with pytest.raises(AttachError, match="no token ids"):
        coverage([Tokens(name="doc", num_tokens=5, token_ids=None)], [1])  # type: ignore[list-item]


def test_encoder_decoders_are_no_exception(library: Any) -> None:
    bart = build("bart")
    memory = library.encode(bart, input_ids=tokens(200), name="doc")
    with memstore.attach(bart, memory) as attached:
        found = attached.coverage("In", tokenizer=tiny.tokenizer())
    assert found == [coverage([memory], tiny.tokenizer()("In", add_special_tokens=False)["input_ids"])]
