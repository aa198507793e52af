"""Which blocks of long memories a prompt reads: one strategy a file."""

from __future__ import annotations

from memstore.errors import AttachError
from memstore.indexes import configured_to_scan
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
    """The selector of this name, or the one given. An ``index``, or a configured one that is more than a scan of all
    keys, finds the blocks for "index" and for "hybrid", which is the default.

    Raises AttachError for what is none, and for an index beside a selector that needs none; ConfigError and PluginError
    for an index that cannot be used.
    """
    name = DEFAULT if selector is None else selector
    if not isinstance(name, BlockSelector) and (not isinstance(name, str) or name not in SELECTORS):
        raise AttachError(f"selector={selector!r} must be one of {', '.join(SELECTORS)}, or a BlockSelector.")
    if name == "index":
        return ByIndex(index)
    if name == "hybrid":
        return Hybrid(ByIndex(index) if index is not None or not configured_to_scan() else None)
    if index is not None:
        raise AttachError(f'index={index!r} finds blocks for selector="hybrid" and "index"; {selector!r} needs none.')
    return name if isinstance(name, BlockSelector) else SELECTORS[name]()
