"""Reading a document once: windows over its tokens, streamed into a store.

An interrupted encoding resumes at the last committed block and ends byte-identical to an uninterrupted one: windows are
independent, never padded, and always batched in the same company.
"""

from __future__ import annotations

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
from memstore.memory_writer import MemoryWriter, token_parts
from memstore.registry import adapter_for
from memstore.windows import Window, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter
    from memstore.store import MemoryStore

Progress = Callable[[int, int], None]


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
    progress: Progress | None = None,
) -> Memory:
    """Read a document with ``model`` and keep what it read under ``name``.

    The document is ``text`` (with its tokenizer), ``input_ids`` [n] or [1, n], or ``input_features`` (Whisper:
    [windows, mels, frames]). dtype: how vectors are stored, by default as the model computes: "float32", "float16"
    or "bfloat16"; keys and values also as "int8" or "int4" (see :mod:`memstore.coding`). progress is called with
    (tokens done, tokens in all). The same document under the same name again is a no-op.

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
        name=name,
        metadata=metadata,
    )
    if name in store:
        return _same_or_raise(store[name], draft)
    with store.create(draft, document) as writer, evaluating(model):
        report = progress if progress is not None else _silent
        report(writer.num_done, draft.num_tokens)
        for block in _blocks(adapter, source, draft, writer, report):
            writer.append(block)
        return writer.finish()


def _silent(done_tokens: int, total_tokens: int) -> None:
    """The progress callback of who wants none."""


def _same_or_raise(memory: Memory, draft: Manifest) -> Memory:
    """The memory if it is what ``draft`` would give, else MemoryExistsError naming what differs."""
    mine, own = memory.manifest.model_dump(), {"id", "created", "digest", "seal", "format_minor"}
    differing = [key for key, value in draft.model_dump().items() if key not in own and value != mine[key]]
    if not differing:
        memory.open().close()  # one that is damaged must not pass for done
        return memory
    if "parts" in differing and (stored := _dtypes(memory.manifest)) != (wanted := _dtypes(draft)):
        differing[differing.index("parts")] = f"dtype (stored as {stored}, not {wanted})"
    raise MemoryExistsError(
        f"The store holds another memory named {draft.name!r} already; it differs in {', '.join(differing)}. "
        "Remove it first, or choose another name."
    )


def _dtypes(manifest: Manifest) -> str:
    return " and ".join(sorted({spec.dtype for part, spec in token_parts(manifest).items()}))


def _blocks(
    adapter: ModelAdapter,
    source: Tensor,
    manifest: Manifest,
    writer: MemoryWriter,
    report: Progress,
) -> Iterator[dict[str, memoryview]]:
    """What is still missing of a memory, in blocks of ``manifest.block_tokens``."""
    pending: dict[str, list[Tensor]] = {part: [] for part in token_parts(manifest)}
    held, done = 0, writer.num_done
    for group in _batches(plan(manifest.num_tokens, manifest.rule), manifest):
        if group[-1].keep_stop <= done:
            continue
        read = _encode_group(adapter, source, group, manifest, writer)
        for i, window in enumerate(group):
            start = max(window.keep_start, done)
            if start >= window.keep_stop:
                continue
            for part, rows in read.items():
                kept = rows[i, start - window.start : window.keep_stop - window.start]
                pending[part].append(kept.clone())  # a view would hold the whole window
            held += window.keep_stop - start
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


def _batches(windows: list[Window], manifest: Manifest) -> Iterator[list[Window]]:
    """Windows that are read together: all have equal length. The first one stands alone if it has a lead of its own."""
    alone = 1 if manifest.lead_ids else 0
    if alone:
        yield windows[:1]
    for start in range(alone, len(windows), manifest.batch_size):
        yield windows[start : start + manifest.batch_size]


def _encode_group(
    adapter: ModelAdapter, source: Tensor, group: list[Window], manifest: Manifest, writer: MemoryWriter
) -> dict[str, Tensor]:
    """Parts [b, window tokens, *shape] of these windows on the CPU, in the stored dtype, or in float32 to be coded."""
    if manifest.has_ids:
        inputs = torch.stack([source[window.start : window.stop] for window in group])
    else:
        nth = group[0].start // manifest.rule.window
        inputs = source[nth : nth + len(group)]
    prefix, first = len(manifest.prefix_ids), group[0].start == 0
    before = torch.tensor(manifest.prefix_ids + (manifest.lead_ids if first else ()), dtype=torch.long)
    if len(before):
        inputs = torch.cat((before.expand(len(group), -1), inputs), dim=1)
    read = {
        part: _finite(rows, manifest.parts[part], group[0])
        for part, rows in adapter.encode(inputs.to(adapter.model.device)).items()
    }
    if prefix and first:
        specs = {part: spec.prefix for part, spec in token_parts(manifest).items()}
        writer.put_prefix({part: encoded(rows[0, :prefix], specs[part]) for part, rows in read.items()})
    return {part: rows[:, len(before) :] for part, rows in read.items()}


def _finite(rows: Tensor, spec: PartSpec, window: Window) -> Tensor:
    rows = rows.detach().to("cpu", torch.float32 if spec.is_coded else getattr(torch, spec.dtype))
    low, high = map(float, rows.aminmax())  # one pass; NaN if any of them is
    if not max(-low, high) <= (LARGEST if spec.is_coded else torch.finfo(rows.dtype).max):
        raise EncodingError(
            f"The model gave NaN or infinite values for the window at token {window.start}, stored as {spec.dtype}. "
            'A wider dtype such as "float32" or "bfloat16" may hold them; else the model is at fault.'
        )
    return rows
