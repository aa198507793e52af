"""Which blocks of long memories a prompt reads: one strategy a file."""

from __future__ import annotations

from memstore.errors import AttachError
from memstore.reading.selectors.by_index import ByIndex
from memstore.reading.selectors.hybrid import Hybrid
from memstore.reading.selectors.interface import BlockSelector, Question
from memstore.reading.selectors.lexical import Lexical
from memstore.reading.selectors.scouting import PerLayer, Scouting

SELECTORS: dict[str, type[BlockSelector]] = {
    "hybrid": Hybrid,
    "scouting": Scouting,
    "lexical": Lexical,
    "per-layer": PerLayer,
    "index": ByIndex,
}
DEFAULT = "hybrid"

__all__ = ["DEFAULT", "SELECTORS", "BlockSelector", "Question", "chosen_selector"]


def chosen_selector(selector: str | BlockSelector | None, index: str | None) -> BlockSelector:
    """The selector of this name, or the one given; an ``index`` means that this index ranks the blocks.

    Raises AttachError for what is none, and for an index beside a selector that needs none.
    """
    if isinstance(selector, BlockSelector):
        made = selector
    elif index is not None or selector == "index":
        if selector not in (None, "index"):
            raise AttachError(f'index={index!r} is what selector="index" ranks blocks by; {selector!r} needs none.')
        return ByIndex(index)
    elif isinstance(selector, str | None) and (selector or DEFAULT) in SELECTORS:
        made = SELECTORS[selector or DEFAULT]()
    else:
        raise AttachError(f"selector={selector!r} must be one of {', '.join(SELECTORS)}, or a BlockSelector.")
    if index is not None:
        raise AttachError(f'index={index!r} is what selector="index" ranks blocks by; this selector needs none.')
    return made
