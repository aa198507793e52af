"""How a long document is cut into windows that a model can read, and which tokens of each window are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memstore.errors import ConfigError, DocumentError
from memstore.manifest import WindowRule

SPAN = 16  # tokens, from itself on, that decide whether one is an anchor
_LARGEST = np.iinfo(np.uint64).max


class Window(NamedTuple):
    """The model reads tokens ``start`` to ``stop``; of these, ``keep_start`` to ``keep_stop`` go into the memory.

    All four are positions in the document, and the ends are exclusive.
    """

    start: int
    stop: int
    keep_start: int
    keep_stop: int


def plan(num_tokens: int, rule: WindowRule, anchors: Sequence[int] = ()) -> list[Window]:
    """Windows in document order whose kept ranges tile [0, num_tokens) exactly; each keeps at least one token.

    A document no longer than ``rule.window`` is one window. Otherwise every window has exactly ``rule.window`` tokens
    (equal lengths batch without padding), and keeps ``window - overlap`` of them, the first one more. An anchor is a
    token at which a window begins to keep: so after it windows lie as if the document were cut differently before it.
    The window before an anchor, and the last one, keep what is left, and end as any other does behind what it keeps, or
    with the document.

    Every kept token, but for the ends of the document, has inside its window:
    - context "left": at least ``overlap`` tokens to its left;
    - context "both": at least ``overlap // 2`` to its left and ``overlap - overlap // 2`` to its right. With an overlap
      of half the window this keeps the middle half of each window, which is the rule that Unlimiformer published.

    Raises ConfigError if ``overlap >= window`` (windows would not advance), DocumentError if there are no tokens.
    """
    window, overlap = rule.window, rule.overlap
    if overlap >= window:
        raise ConfigError(
            f"overlap = {overlap} must be smaller than window = {window}, or windows do not advance. "
            f"Choose an overlap of at most {window - 1}; half the window ({window // 2}) is usual."
        )
    if num_tokens < 1:
        raise DocumentError(f"A document of {num_tokens} tokens has nothing to encode.")
    if num_tokens <= window:
        return [Window(0, num_tokens, 0, num_tokens)]
    step, behind = window - overlap, 0 if rule.context == "left" else overlap - overlap // 2
    windows = []
    for begin, end in pairwise((0, *anchors, num_tokens)):
        first = begin + step if begin else window - behind  # nothing before the document has to be seen
        last = end - behind if end == num_tokens else end  # nor anything behind it
        for keep_start, keep_stop in pairwise((begin, *range(first, last, step), end)):
            start = min(max(keep_stop + behind - window, 0), num_tokens - window)
            windows.append(Window(start, start + window, keep_start, keep_stop))
    return windows


def anchors(token_ids: npt.NDArray[np.integer[Any]], rule: WindowRule) -> tuple[int, ...]:
    """The tokens of a document [n] at which windows begin anew, ascending: none if the rule has none.

    A token is one if a hash of the ``SPAN`` tokens from it on is less than that of each other token up to
    ``rule.anchors`` before and behind it, and so many there are on both sides. So whether it is one follows from its
    surroundings alone: an edit moves the anchors behind it, but neither adds nor loses any but near it. There is one in
    about every ``2 * rule.anchors`` tokens, and fewer where a text repeats itself.
    """
    n, reach = len(token_ids), rule.anchors
    if reach is None or n <= rule.window or n <= 2 * reach or n < SPAN:
        return ()
    with np.errstate(over="ignore"):
        mixed = _mixed(token_ids.astype(np.uint64))
        hashes = np.full(n, _LARGEST)
        spans = np.zeros(n - SPAN + 1, np.uint64)
        for i in range(SPAN):
            spans = spans * np.uint64(0x9E3779B97F4A7C15) + mixed[i : i + len(spans)]
        hashes[: len(spans)] = _mixed(spans)
    least = _minima(hashes, reach)
    around = np.minimum(least[: n - 2 * reach], least[reach + 1 :])
    return tuple((np.flatnonzero(hashes[reach : n - reach] < around) + reach).tolist())


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _minima(values: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint64]:
    """The least of every ``size`` successive values: [n] -> [n - size + 1]. Two passes, whatever the size."""
    n, count = len(values), -(-len(values) // size)
    rows = np.append(values, np.full(count * size - n, _LARGEST)).reshape(count, size)
    until = np.minimum.accumulate(rows, axis=1).ravel()
    since = np.minimum.accumulate(rows[:, ::-1], axis=1)[:, ::-1].ravel()
    return np.minimum(since[: n - size + 1], until[size - 1 : n])
