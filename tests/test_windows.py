"""Windows: kept ranges tile the document, windows have one length, none is redundant."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.errors import ConfigError, DocumentError
from memstore.manifest import WindowRule
from memstore.windows import SPAN, Window, anchors, plan

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


@st.composite
def anchored(draw: st.DrawFn) -> tuple[int, WindowRule, list[int]]:
    num_tokens, cut = draw(cases())
    places = draw(st.sets(st.integers(1, num_tokens - 1), max_size=6)) if num_tokens > 1 else set()
    return num_tokens, cut, sorted(places)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(anchored())
def test_windows_begin_anew_at_anchors_with_as_much_in_sight(case: tuple[int, WindowRule, list[int]]) -> None:
    num_tokens, cut, places = case
    windows = plan(num_tokens, cut, places)
    assert (windows[0].keep_start, windows[-1].keep_stop) == (0, num_tokens)
    assert all(a.keep_stop == b.keep_start for a, b in pairwise(windows))
    left, right = (cut.overlap, 0) if cut.context == "left" else (cut.overlap // 2, -(-cut.overlap // 2))
    for w in windows:
        assert 0 <= w.start <= w.keep_start < w.keep_stop <= w.stop <= num_tokens
        assert w.stop - w.start == min(cut.window, num_tokens)
        assert w.keep_start - w.start >= left or w.start == 0
        assert w.stop - w.keep_stop >= right or w.stop == num_tokens
    if num_tokens > cut.window:
        assert set(places) <= {w.keep_start for w in windows}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(anchored(), st.integers(1, 50))
def test_what_comes_before_an_anchor_does_not_change_how_windows_lie_after_it(
    case: tuple[int, WindowRule, list[int]], added: int
) -> None:
    num_tokens, cut, places = case
    before = 2 * cut.window  # so that the anchor is no nearer to the start than a window
    n, here = num_tokens + before, [before, *(place + before for place in places)]
    longer = [before + added, *(place + before + added for place in places)]

    def after(windows: list[Window], anchor: int) -> list[Window]:
        return [Window(*(place - anchor for place in w)) for w in windows if w.keep_start >= anchor]

    assert after(plan(n, cut, here), before) == after(plan(n + added, cut, longer), before + added)


REACH = 64
ANCHORED = WindowRule(window=32, overlap=16, context="left", anchors=REACH)


def naive(ids: np.ndarray[Any, Any], reach: int) -> list[int]:
    """The definition, with Python's whole numbers."""
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    def hashed(i: int) -> int:
        if i + SPAN > len(ids):
            return mask
        total = 0
        for token in ids[i : i + SPAN].tolist():
            total = (total * 0x9E3779B97F4A7C15 + mixed(token)) & mask
        return mixed(total)

    hashes = [hashed(i) for i in range(len(ids))]
    return [
        i
        for i in range(reach, len(ids) - reach)
        if hashes[i] < min(hashes[i - reach : i] + hashes[i + 1 : i + reach + 1])
    ]


@pytest.mark.parametrize("n", [0, 1, 15, 128, 129, 130, 500, 1500])
def test_anchors_are_what_their_definition_says(n: int) -> None:
    ids = np.random.default_rng(n).integers(0, 50_000, n).astype(np.int32)
    assert list(anchors(ids, ANCHORED)) == (naive(ids, REACH) if n > 2 * REACH else [])
    assert anchors(ids, ANCHORED.model_copy(update={"anchors": None})) == ()


def test_anchors_are_as_far_apart_as_is_said() -> None:
    ids = np.random.default_rng(7).integers(0, 50_000, 1_000_000).astype(np.int32)
    places = anchors(ids, ANCHORED)
    gaps = np.diff([0, *places, len(ids)])
    assert gaps.min() >= REACH and gaps.mean() == pytest.approx(2 * REACH, rel=0.05)
    assert anchors(np.zeros(5000, np.int32), ANCHORED) == ()  # nothing stands out


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(0, 1900), st.integers(0, 60), st.integers(0, 60))
def test_an_edit_changes_anchors_near_it_alone(seed: int, at: int, lost: int, added: int) -> None:
    chance = np.random.default_rng(seed)
    old = chance.integers(0, 500, 2000).astype(np.int32)
    new = np.concatenate((old[:at], chance.integers(0, 500, added).astype(np.int32), old[at + lost :]))
    shift, near = len(new) - len(old), REACH + SPAN
    before, after = anchors(old, ANCHORED), anchors(new, ANCHORED)
    assert [a for a in before if a < at - near] == [a for a in after if a < at - near]
    far = [a + shift for a in before if near + at + lost <= a < 2000 - REACH]
    assert far == [a for a in after if a >= at + added + near]
