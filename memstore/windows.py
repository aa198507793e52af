"""How a long document is cut into windows that a model can read, and which tokens of each window are kept."""

from __future__ import annotations

from typing import NamedTuple

from memstore.errors import ConfigError, DocumentError
from memstore.manifest import WindowRule


class Window(NamedTuple):
    """The model reads tokens ``start`` to ``stop``; of these, ``keep_start`` to ``keep_stop`` go into the memory.

    All four are positions in the document, and the ends are exclusive.
    """

    start: int
    stop: int
    keep_start: int
    keep_stop: int


def plan(num_tokens: int, rule: WindowRule) -> list[Window]:
    """Windows in document order whose kept ranges tile [0, num_tokens) exactly; each keeps at least one token.

    A document no longer than ``rule.window`` is one window. Otherwise every window has exactly ``rule.window`` tokens
    (equal lengths batch without padding) and begins ``window - overlap`` after the one before; only the last begins
    earlier, so that it ends with the document.

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
    step = window - overlap
    margin = overlap if rule.context == "left" else overlap // 2
    last = num_tokens - window
    starts = range(0, last + step, step)  # the first start at or after ``last`` closes the list, moved back to it
    edges = [0, *(start + margin for start in starts[1:]), num_tokens]
    return [
        Window(min(start, last), min(start, last) + window, keep_start, keep_stop)
        for start, keep_start, keep_stop in zip(starts, edges, edges[1:], strict=False)
    ]
