"""Windows: kept ranges tile the document, windows have one length, none is redundant."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.errors import ConfigError, DocumentError
from memstore.manifest import WindowRule
from memstore.windows import Window, plan

Context = Literal["both", "left"]
CONTEXTS: list[Context] = ["both", "left"]


def rule(window: int, overlap: int, context: Context) -> WindowRule:
    return WindowRule(window=window, overlap=overlap, context=context)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, WindowRule]:
    window = draw(st.integers(1, 40))
    overlap = draw(st.integers(0, window - 1))
    return draw(st.integers(1, 400)), rule(window, overlap, draw(st.sampled_from(CONTEXTS)))


def check(num_tokens: int, cut: WindowRule) -> None:
    windows = plan(num_tokens, cut)
    assert (windows[0].start, windows[-1].stop) == (0, num_tokens)
    assert (windows[0].keep_start, windows[-1].keep_stop) == (0, num_tokens)
    assert all(a.keep_stop == b.keep_start for a, b in pairwise(windows))
    for w in windows:
        assert 0 <= w.start <= w.keep_start < w.keep_stop <= w.stop <= num_tokens
        assert w.stop - w.start == min(cut.window, num_tokens)
        left, right = (cut.overlap, 0) if cut.context == "left" else (cut.overlap // 2, -(-cut.overlap // 2))
        assert w.keep_start - w.start >= left or w.start == 0
        assert w.stop - w.keep_stop >= right or w.stop == num_tokens
    step = cut.window - cut.overlap
    assert [w.start for w in windows[:-1]] == [i * step for i in range(len(windows) - 1)]
    assert all(w.stop < num_tokens for w in windows[:-1])  # so without its last window a plan would not reach the end


@given(cases())
def test_invariants(case: tuple[int, WindowRule]) -> None:
    check(*case)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("window", "overlap"), [(1, 0), (8, 0), (8, 4), (9, 5), (8, 7), (1024, 512)])
def test_lengths_around_the_window(window: int, overlap: int, context: Context) -> None:
    for num_tokens in {1, max(window - 1, 1), window, window + 1, 2 * window}:
        check(num_tokens, rule(window, overlap, context))
        assert (len(plan(num_tokens, rule(window, overlap, context))) == 1) == (num_tokens <= window)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_million_tokens(context: Context) -> None:
    check(1_000_000, rule(1024, 512, context))


def test_an_encoder_keeps_the_middle_half() -> None:
    assert plan(20, rule(8, 4, "both")) == [
        Window(0, 8, 0, 6),
        Window(4, 12, 6, 10),
        Window(8, 16, 10, 14),
        Window(12, 20, 14, 20),
    ]


def test_the_last_window_moves_back() -> None:
    assert plan(17, rule(8, 4, "both"))[-2:] == [Window(8, 16, 10, 14), Window(9, 17, 14, 17)]
    assert plan(17, rule(8, 4, "left"))[-2:] == [Window(8, 16, 12, 16), Window(9, 17, 16, 17)]


def test_a_decoder_keeps_what_is_new() -> None:
    assert plan(20, rule(8, 4, "left")) == [
        Window(0, 8, 0, 8),
        Window(4, 12, 8, 12),
        Window(8, 16, 12, 16),
        Window(12, 20, 16, 20),
    ]


@pytest.mark.parametrize("overlap", [8, 9])
def test_an_overlap_that_does_not_advance(overlap: int) -> None:
    with pytest.raises(ConfigError, match="at most 7"):
        plan(100, rule(8, overlap, "left"))


def test_no_tokens() -> None:
    with pytest.raises(DocumentError):
        plan(0, rule(8, 4, "left"))
