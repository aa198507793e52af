"""Reading a document once: windows over its tokens, streamed into a store.

An interrupted encoding resumes at the last committed block and ends byte-identical to an uninterrupted one: windows are
independent, never padded, and always batched in the same company.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.coding import LARGEST, encoded
from memstore.describe import describe
from memstore.errors import EncodingError, MemoryExistsError
from memstore.evaluating import evaluating
from memstore.manifest import Manifest, PartSpec
from memstore.memory import Memory
from memstore.memory_writer import MemoryWriter, dtypes, token_parts
from memstore.pending import give_up, manifest_of
from memstore.registry import adapter_for
from memstore.windows import Window, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Read = Callable[[list[Window]], list[dict[str, Tensor]]]  # what is kept of each window of a group


def encode(
    store: MemoryStore,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    text: str | None = None,
    *,
    name: str,
    input_ids: Any = None,
    input_features: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    window: int | None = None,
    overlap: int | None = None,
    dtype: str | torch.dtype | None = None,
    batch_size: int | None = None,
    anchors: bool | None = None,
    progress: Progress | None = None,
) -> Memory:
    """Read a document with ``model`` and keep what it read under ``name``.

    The document is ``text`` (with its tokenizer), ``input_ids`` [n] or [1, n], or ``input_features`` (Whisper:
    [windows, mels, frames]). dtype: how vectors are stored, by default as the model computes: "float32", "float16"
    or "bfloat16"; keys and values also as "int8" or "int4" (see :mod:`memstore.coding`). anchors: whether windows begin
    anew now and then, by the text itself (:func:`memstore.windows.anchors`), so that after an edit those behind it can
    be reused by :func:`memstore.updating.update`; None is as the memory of this name was begun, else no. progress is
    called with (tokens done, tokens in all). The same document under the same name again is a no-op.

    Raises DocumentError, ConfigError, UnsupportedModelError, MemoryExistsError, MemoryBusyError, EncodingError, and
    DamagedMemoryError where that memory is damaged.
    """
    adapter: ModelAdapter = adapter_for(model)(model)
    draft, document, source = describe(
        adapter,
        tokenizer,
        text,
        input_ids,
        input_features,
        window=window,
        overlap=overlap,
        dtype=dtype,
        batch_size=batch_size,
        anchored=is_anchored(store, name, False) if anchors is None else anchors,
        name=name,
        metadata=metadata,
    )
    before = store.get(name)
    if before is not None:
        differing = differences(before.manifest, draft)
        if differing:
            raise another_exists(before.manifest, draft, differing)
        before.open().close()  # one that is damaged must not pass for done
        give_up(store, name)
        logger.info("memory %r holds this document already", name)
        return before
    with store.create(draft, document) as writer:
        return write(writer, adapter, Reader(adapter, source, writer), progress)


def encode_again(
    memory: Memory,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    text: str | None = None,
    *,
    input_ids: Any = None,
) -> Memory:
    """Read the document of a memory again, by the memory's own rule, and put what was read in its place once it is
    whole. Raises what :func:`encode` raises; MemoryExistsError if another process has changed the memory meanwhile."""
    manifest, adapter = memory.manifest, adapter_for(model)(model)
    draft, document, source = describe(
        adapter,
        tokenizer,
        text,
        input_ids,
        None,
        window=manifest.rule.window,
        overlap=manifest.rule.overlap,
        dtype=next(iter(manifest.parts.values())).dtype,
        batch_size=manifest.batch_size,
        anchored=manifest.rule.anchors is not None,
        name=manifest.name,
        metadata=manifest.metadata,
    )
    with memory.store.create(draft, document, manifest) as writer:
        return write(writer, adapter, Reader(adapter, source, writer), None)


def is_anchored(store: MemoryStore, name: str, otherwise: bool) -> bool:
    """Whether the memory of this name, complete or in progress, has a rule with anchors, if there is one."""
    before = store[name].manifest if name in store else manifest_of(store.records, name)
    return otherwise if before is None else before.rule.anchors is not None


def differences(manifest: Manifest, draft: Manifest) -> list[str]:
    """The names of the fields in which a memory differs from what ``draft`` would give."""
    return draft.differing(manifest, "id", "created", "digest", "seal", "format_minor")


def another_exists(manifest: Manifest, draft: Manifest, differing: list[str]) -> MemoryExistsError:
    """What to raise where the memory of this name is another one."""
    if "parts" in differing and (stored := " and ".join(dtypes(manifest))) != (wanted := " and ".join(dtypes(draft))):
        differing[differing.index("parts")] = f"dtype (stored as {stored}, not {wanted})"
        differing = [field for field in differing if field != "block_tokens"]  # which follows from it
    return MemoryExistsError(
        f"The store holds another memory named {draft.name!r} already; it differs in {', '.join(differing)}. "
        "Remove it first, or choose another name."
    )


def write(writer: MemoryWriter, adapter: ModelAdapter, read: Read, progress: Progress | None) -> Memory:
    """What is still missing of a memory, read in blocks of ``block_tokens``, and the memory completed."""
    manifest = writer.manifest
    with evaluating(adapter.model):
        report = progress if progress is not None else _silent
        report(writer.num_done, manifest.num_tokens)
        for block in _blocks(adapter, manifest, writer.num_done, read, report):
            writer.append(block)
        return writer.finish()


def _silent(done_tokens: int, total_tokens: int) -> None:
    """The progress callback of who wants none."""


def _blocks(
    adapter: ModelAdapter, manifest: Manifest, done: int, read: Read, report: Progress
) -> Iterator[dict[str, memoryview]]:
    """The blocks after the first ``done`` tokens."""
    pending: dict[str, list[Tensor]] = {part: [] for part in token_parts(manifest)}
    held = 0
    for group in groups(manifest):
        if group[-1].keep_stop <= done:
            continue
        for window, kept in zip(group, read(group), strict=True):
            skip = max(done - window.keep_start, 0)
            if skip >= window.keep_stop - window.keep_start:
                continue
            for part, rows in kept.items():
                pending[part].append(rows[skip:].clone())  # a view would hold the whole window
            held += window.keep_stop - window.keep_start - skip
        last = group[-1].keep_stop == manifest.num_tokens
        while held >= manifest.block_tokens or (last and held):
            size = min(held, manifest.block_tokens)
            joined = {part: torch.cat(pending.pop(part)) for part in list(pending)}
            block = {part: rows[:size] for part, rows in joined.items()}
            block |= adapter.summaries(block)
            yield {part: encoded(rows, manifest.parts[part]) for part, rows in block.items()}
            pending = {part: [rows[size:].clone()] for part, rows in joined.items()}
            held -= size
        report(group[-1].keep_stop, manifest.num_tokens)


def groups(manifest: Manifest) -> Iterator[list[Window]]:
    """Windows that are read together: all have equal length. The first one stands alone if it has a lead of its own,
    and none is read with one from behind an anchor: so the company of each follows from what is near it, too."""
    restarts, group = set(manifest.anchors), list[Window]()
    for window in plan(manifest.num_tokens, manifest.rule, manifest.anchors):
        alone = bool(group and group[0].start == 0 and manifest.lead_ids)
        if group and (alone or len(group) == manifest.batch_size or window.keep_start in restarts):
            yield group
            group = []
        group.append(window)
    yield group


class Reader:
    """Reads groups of windows with a model.

    Gives for each window its parts {name: [kept tokens, *shape]} on the CPU, in the stored dtype, or in float32 to be
    coded. ``num_read`` counts the windows.
    """

    def __init__(self, adapter: ModelAdapter, source: Tensor, writer: MemoryWriter) -> None:
        self.adapter, self.source, self.writer = adapter, source, writer
        self.num_read = 0

    def __call__(self, group: list[Window]) -> list[dict[str, Tensor]]:
        self.num_read += len(group)
        manifest, first = self.writer.manifest, group[0].start == 0
        if manifest.has_ids:
            inputs = torch.stack([self.source[window.start : window.stop] for window in group])
        else:
            nth = group[0].start // manifest.rule.window
            inputs = self.source[nth : nth + len(group)]
        before = torch.tensor(manifest.prefix_ids + (manifest.lead_ids if first else ()), dtype=torch.long)
        if len(before):
            inputs = torch.cat((before.expand(len(group), -1), inputs), dim=1)
        read = {
            part: _finite(rows, manifest.parts[part], group[0])
            for part, rows in self.adapter.encode(inputs.to(self.adapter.model.device)).items()
        }
        if manifest.prefix_ids and first:
            specs = {part: spec.prefix for part, spec in token_parts(manifest).items()}
            prefix = {part: rows[0, : len(manifest.prefix_ids)] for part, rows in read.items()}
            self.writer.put_prefix({part: encoded(rows, specs[part]) for part, rows in prefix.items()})
        skip = len(before)
        return [
            {
                part: rows[i, skip + window.keep_start - window.start : skip + window.keep_stop - window.start]
                for part, rows in read.items()
            }
            for i, window in enumerate(group)
        ]


def _finite(rows: Tensor, spec: PartSpec, window: Window) -> Tensor:
    rows = rows.detach().to("cpu", torch.float32 if spec.is_coded else getattr(torch, spec.dtype))
    low, high = map(float, rows.aminmax())  # one pass; NaN if any of them is
    if not max(-low, high) <= (LARGEST if spec.is_coded else torch.finfo(rows.dtype).max):
        raise EncodingError(
            f"The model gave NaN or infinite values for the window at token {window.start}, stored as {spec.dtype}. "
            'A wider dtype such as "float32" or "bfloat16" may hold them; else the model is at fault.'
        )
    return rows
