"""Reading a changed text again: only what changed is read, and the memory is the one that a fresh encoding would give.

A window is reused if it, and the windows that it was read in one batch with, hold the tokens that they held before: a
model that is given the same tensors gives the same bits again (on one machine and device, with as many threads). What
is reused are the stored vectors. So of keys and values in int8 or int4, whose scales belong to 64 tokens at places that
an edit moves, only the blocks before the edit are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.describe import describe
from memstore.encode import Progress, Read, Reader, another_exists, differences, groups, is_anchored, write
from memstore.errors import DamagedMemoryError, MemoryExistsError, MemoryNotFoundError
from memstore.manifest import Manifest
from memstore.memory import Int32, Memory
from memstore.memory_writer import MemoryWriter, token_parts
from memstore.open_memory import OpenMemory
from memstore.pending import give_up
from memstore.registry import adapter_for
from memstore.values import block_key, prefix_key
from memstore.windows import Window, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)

# In these a memory may differ from one of an earlier version of its text; any other difference makes it another memory.
DOCUMENT = {"num_tokens", "document_digest", "anchors", "lead_ids", "prefix_ids", "metadata"}


@dataclass(frozen=True)
class Update:
    """The memory of a text: of how many windows it consists, and how many of them the model has read just now.
    unchanged: it is the memory that was there before."""

    memory: Memory
    num_windows: int
    num_read: int
    unchanged: bool = False

    @property
    def num_reused(self) -> int:
        """Windows whose vectors were there already."""
        return self.num_windows - self.num_read


def update(
    store: MemoryStore,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    name: str,
    metadata: Mapping[str, Any] | None = None,
    window: int | None = None,
    overlap: int | None = None,
    dtype: str | torch.dtype | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Update:
    """Read a text and keep what was read under ``name``, in the place of what was read of an earlier version of it.

    Until the new memory is complete, the old one is there as before; who has it open keeps reading it. Options are
    those of :func:`memstore.encode.encode`. metadata: None for that of the earlier version. A new memory has anchors;
    one that exists keeps its rule, and without anchors only windows before an edit are reused. The same text again is a
    no-op, but for a memory that cannot be opened: all of that is read again.

    Raises what ``encode`` raises; MemoryExistsError if the memory of this name was written by another model, or with
    other options.
    """
    options = {"window": window, "overlap": overlap, "dtype": dtype, "batch_size": batch_size}
    while True:
        before = store.get(name)
        try:
            return _update(store, model, tokenizer, text, before, name, metadata, options, progress)
        except (MemoryNotFoundError, MemoryExistsError):
            now = store.get(name)
            if (now and now.manifest.id) == (before and before.manifest.id):
                raise
            logger.info("memory %r has been changed by another process: looking again", name)


def _update(
    store: MemoryStore,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    before: Memory | None,
    name: str,
    metadata: Mapping[str, Any] | None,
    options: dict[str, Any],
    progress: Progress | None,
) -> Update:
    adapter: ModelAdapter = adapter_for(model)(model)
    draft, document, source = describe(
        adapter,
        tokenizer,
        text,
        None,
        None,
        **options,
        anchored=is_anchored(store, name, True),
        name=name,
        metadata=before.metadata if metadata is None and before is not None else metadata,
    )
    num_windows = len(plan(draft.num_tokens, draft.rule, draft.anchors))
    if before is None:
        with store.create(draft, document) as writer:
            reader = Reader(adapter, source, writer)
            return Update(write(writer, adapter, reader, progress), num_windows, reader.num_read)
    differing = differences(before.manifest, draft)
    if not set(differing) <= DOCUMENT:
        raise another_exists(before.manifest, draft, differing)
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(before.open("anew"))  # what is damaged must not get a checksum of its own
        except DamagedMemoryError as error:
            logger.warning("all is read again: %s", error)
            opened = None
        if opened is not None and not differing:
            give_up(store, name)
            logger.info("memory %r holds this document already", name)
            return Update(before, num_windows, 0, unchanged=True)
        writer = stack.enter_context(store.create(draft, document, before.manifest))
        reader = Reader(adapter, source, writer)
        read: Read = reader
        if opened is not None:
            assert document.token_ids is not None
            earlier = Earlier(opened, draft, document.token_ids)
            earlier.copy(writer)
            read = lambda group: earlier.rows(group) or reader(group)  # noqa: E731
        memory = write(writer, adapter, read, progress)
        logger.info("memory %r: %d of %d windows were read again", name, reader.num_read, num_windows)
        return Update(memory, num_windows, reader.num_read)


class Earlier:
    """What an earlier version of a document holds of a new one with the tokens ``ids`` [n]."""

    def __init__(self, opened: OpenMemory, draft: Manifest, ids: Int32) -> None:
        self.opened, self.old, self.draft, self.ids = opened, opened.manifest, draft, ids
        self._known: dict[Any, list[Window]] = {}
        try:
            old_ids = opened.memory.token_ids
        except DamagedMemoryError:  # then all is read again
            old_ids = None
        if old_ids is not None and self.old.prefix_ids == draft.prefix_ids:
            for group in groups(self.old):
                self._known.setdefault(_read_of(group, old_ids, self.old), group)

    def copy(self, writer: MemoryWriter) -> None:
        """Append all blocks at the document's start that are as they were, and the prefix. Where the first window must
        be read again, so is the prefix, and replaces this one."""
        same = 0  # tokens at the start whose windows lie where they lay
        for group in groups(self.draft):
            if self._known.get(_read_of(group, self.ids, self.draft)) != group:
                break
            same = group[-1].keep_stop
        whole = same == self.draft.num_tokens == self.old.num_tokens
        count = self.draft.num_blocks if whole else same // self.draft.block_tokens
        try:
            if self._known and self.draft.prefix_ids and not writer.num_blocks_done:  # else it has the one that is due
                writer.put_prefix({part: self.opened.value(prefix_key(part)) for part in token_parts(self.draft)})
        except DamagedMemoryError:  # it is read with the first window
            self._known.clear()
            return
        try:
            for i in range(writer.num_blocks_done, count):
                writer.append({part: self.opened.value(block_key(part, i)) for part in self.draft.parts})
        except DamagedMemoryError:
            return

    def rows(self, group: list[Window]) -> list[dict[str, Tensor]] | None:
        """What is kept of each window of a group, or None if it must be read again."""
        known = self._known.get(_read_of(group, self.ids, self.draft))
        specs = token_parts(self.draft)
        if known is None or any(spec.is_coded for spec in specs.values()):
            return None
        kept = []
        try:
            for new, old in zip(group, known, strict=True):
                shift = old.start - new.start
                start, stop = new.keep_start + shift, new.keep_stop + shift
                if not old.keep_start <= start < stop <= old.keep_stop:
                    return None
                kept.append({part: self.opened.rows(part, start, stop) for part in specs})
        except DamagedMemoryError:
            return None
        return kept


def _read_of(group: list[Window], ids: Int32, manifest: Manifest) -> Any:
    """All that the model is given to read a group, but for the prefix of all."""
    lead = manifest.lead_ids if group[0].start == 0 else None
    return lead, tuple(ids[window.start : window.stop].tobytes() for window in group)
