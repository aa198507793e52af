"""Reading a document once: windows over its tokens, streamed into a store.

An interrupted encoding resumes at the last committed block and ends byte-identical to an uninterrupted one: windows are
independent, never padded, and always batched in the same company.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from xxhash import xxh3_128

from memstore.errors import ConfigError, DocumentError, EncodingError, MemoryExistsError
from memstore.fingerprint import fingerprint, tensor_bytes
from memstore.manifest import ITEM_BYTES, Manifest, PartSpec, WindowRule
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter
from memstore.registry import adapter_for
from memstore.text import tokenize
from memstore.windows import Window, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter
    from memstore.store import MemoryStore

BATCH = 4  # windows read at once
BLOCK_BYTES = 64 << 20  # of all parts together; a block is what one commit writes and what a crash can cost
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
    [windows, mels, frames]). dtype: how vectors are stored, by default the model's own. progress is called with (tokens
    done, tokens in all). The same document under the same name again is a no-op.

    Raises DocumentError, ConfigError, UnsupportedModelError, MemoryExistsError, MemoryBusyError, EncodingError, and
    DamagedMemoryError where that memory is damaged.
    """
    adapter: ModelAdapter = adapter_for(model)(model)
    if sum(given is not None for given in (text, input_ids, input_features)) != 1:
        raise DocumentError("Give exactly one of text (with a tokenizer), input_ids and input_features.")
    features, feature_tokens = (None, 0) if input_features is None else adapter.feature_windows(input_features)
    if features is None and not adapter.vocab_size:
        raise DocumentError(f"{type(model).__name__} reads input_features, not text or token ids.")
    document = _document(tokenizer, text, input_ids, adapter.vocab_size)
    rule = adapter.rule(feature_tokens or window, 0 if feature_tokens else overlap)
    if features is None:
        assert document.token_ids is not None
        num_tokens = len(document.token_ids)
    else:
        num_tokens = len(features) * feature_tokens
    prefix = adapter.prefix(tokenizer) if tokenizer is not None and num_tokens > rule.window else []
    if prefix and _begins_twice(document, prefix):
        document = Document(document.text, document.token_ids[1:], document.offsets[1:])  # type: ignore[index]
        num_tokens -= 1
    windows = plan(num_tokens, rule)
    room = adapter.native_window - rule.window - len(prefix)
    if prefix and room < 0:
        raise ConfigError(
            f"window={rule.window} leaves no room for the {len(prefix)} tokens of the chat template's header, which "
            f"stand before every window; the model has {adapter.native_window} positions."
        )
    parts = adapter.parts(_dtype_name(dtype, model.dtype))
    draft = _draft(
        id=uuid.uuid4().hex,
        name=name,
        created=time.time(),
        kind=adapter.kind,
        adapter=type(adapter).__name__,
        num_tokens=num_tokens,
        block_tokens=_block_tokens(parts),
        parts=parts,
        rule=rule,
        prefix_ids=tuple(prefix),
        lead_ids=_lead(document, rule, room) if prefix else (),
        batch_size=BATCH if batch_size is None else batch_size,
        device=model.device.type,
        fingerprint=fingerprint(adapter, tokenizer),
        document_digest=_digest(document, features),
        has_text=text is not None,
        has_ids=document.token_ids is not None,
        metadata=dict(metadata or {}),
    )
    if name in store:
        return _same_or_raise(store[name], draft)
    source = features if features is not None else torch.from_numpy(np.asarray(document.token_ids)).long()
    with store.create(draft, document) as writer, _evaluating(model):
        if progress is not None:
            progress(writer.num_done, num_tokens)
        for block in _blocks(adapter, source, windows, draft, writer):
            writer.append(block)
            if progress is not None:
                progress(writer.num_done, num_tokens)
        return writer.finish()


def _document(tokenizer: PreTrainedTokenizerBase | None, text: str | None, input_ids: Any, vocab_size: int) -> Document:
    if text is not None:
        if tokenizer is None:
            raise DocumentError("A document given as text needs its tokenizer.")
        ids, offsets = tokenize(tokenizer, text)
        return Document(text, _known(ids, vocab_size), offsets)
    if input_ids is None:
        return Document(None, None, None)
    wanted = "input_ids must be whole numbers of shape [n] or [1, n] with n > 0"
    try:
        ids = np.asarray(torch.as_tensor(input_ids).cpu())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DocumentError(f"{wanted}: {error}.") from error
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise DocumentError(f"{wanted}, not {ids.dtype} of shape {list(ids.shape)}.")
    return Document(None, _known(ids, vocab_size).astype(np.int32), None)


def _known(ids: np.ndarray[Any, Any], vocab_size: int) -> np.ndarray[Any, Any]:
    """The ids, if the model has an embedding for each of them."""
    unknown = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(unknown):
        raise DocumentError(
            f"Token {unknown[0]} has id {ids[unknown[0]]}, and the model knows ids 0 to {vocab_size - 1}. Is it the "
            "model that the tokenizer belongs to?"
        )
    return ids


def _draft(**fields: Any) -> Manifest:
    if isinstance(fields["batch_size"], bool) or not isinstance(fields["batch_size"], int) or fields["batch_size"] < 1:
        raise ConfigError(f"batch_size={fields['batch_size']!r} must be a whole number of at least 1.")
    try:
        return Manifest(**fields)
    except ValidationError as error:  # what is left to be wrong is name and metadata
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise DocumentError(f"The document {fields['name']!r} cannot be described: {wrong}.") from error


def _begins_twice(document: Document, prefix: list[int]) -> bool:
    """Whether the tokenizer put the same special token before the document that the prefix begins with."""
    ids, offsets = document.token_ids, document.offsets
    return ids is not None and offsets is not None and bool(ids[0] == prefix[0] and offsets[0, 1] == 0)


def _lead(document: Document, rule: WindowRule, room: int) -> tuple[int, ...]:
    """A quarter window of the document's own later text, or what there is room for, to be read before its start.

    What follows the prefix closely draws attention whatever is asked, as a sink does, and would hide the rest.
    """
    assert document.token_ids is not None
    start = rule.window // 2
    return tuple(document.token_ids[start : start + min(rule.window // 4, room)].tolist())


def _dtype_name(dtype: str | torch.dtype | None, default: torch.dtype) -> str:
    name = str(default if dtype is None else dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ConfigError(f"dtype={name!r}: vectors are stored as {', '.join(ITEM_BYTES)}.")
    return name


def _block_tokens(parts: Mapping[str, PartSpec]) -> int:
    """Tokens of a block: a power of two between 256 and 16,384 that keeps a block under BLOCK_BYTES."""
    fitting = BLOCK_BYTES // sum(part.token_bytes for part in parts.values())
    return max(256, min(16384, 1 << max(fitting, 1).bit_length() - 1))


def _digest(document: Document, features: Tensor | None) -> str:
    digest = xxh3_128()
    if document.text is not None:
        digest.update(document.text.encode())
    elif document.token_ids is not None:
        digest.update(document.token_ids.tobytes())
    elif features is not None:
        digest.update(tensor_bytes(features))
    return digest.hexdigest()


def _same_or_raise(memory: Memory, draft: Manifest) -> Memory:
    """The memory if it is what ``draft`` would give, else MemoryExistsError naming what differs."""
    mine, own = memory.manifest.model_dump(), {"id", "created", "digest", "seal", "format_minor"}
    differing = [key for key, value in draft.model_dump().items() if key not in own and value != mine[key]]
    if not differing:
        memory.open().close()  # one that is damaged must not pass for done
        return memory
    raise MemoryExistsError(
        f"The store holds another memory named {draft.name!r} already; it differs in {', '.join(differing)}. "
        "Remove it first, or choose another name."
    )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout, gradients and autocast, which the fingerprint does not know; and back to how the model was."""
    training = [module for module in model.modules() if module.training]  # a part may be frozen in evaluation mode
    model.eval()
    try:
        with torch.no_grad(), _no_autocast(model.device.type):
            yield
    finally:
        for module in training:
            module.training = True


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    available = torch.amp.autocast_mode.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else nullcontext()


def _blocks(
    adapter: ModelAdapter, source: Tensor, windows: list[Window], manifest: Manifest, writer: MemoryWriter
) -> Iterator[dict[str, memoryview]]:
    """What is still missing of a memory, in blocks of ``manifest.block_tokens``."""
    pending: dict[str, list[Tensor]] = {part: [] for part in manifest.parts}
    held, done = 0, writer.num_done
    for group in _batches(windows, manifest):
        if group[-1].keep_stop <= done:
            continue
        encoded = _encode_group(adapter, source, group, manifest, writer)
        for i, window in enumerate(group):
            start = max(window.keep_start, done)
            if start >= window.keep_stop:
                continue
            for part, rows in encoded.items():
                pending[part].append(rows[i, start - window.start : window.keep_stop - window.start])
            held += window.keep_stop - start
        last = group[-1].keep_stop == manifest.num_tokens
        while held >= manifest.block_tokens or (last and held):
            size = min(held, manifest.block_tokens)
            joined = {part: torch.cat(rows) for part, rows in pending.items()}
            yield {part: tensor_bytes(rows[:size]) for part, rows in joined.items()}
            pending = {part: [rows[size:]] for part, rows in joined.items()}
            held -= size


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
    """Parts [b, window tokens, *shape] of these windows on the CPU, in the stored dtype."""
    if manifest.has_ids:
        inputs = torch.stack([source[window.start : window.stop] for window in group])
    else:
        nth = group[0].start // manifest.rule.window
        inputs = source[nth : nth + len(group)]
    prefix, first = len(manifest.prefix_ids), group[0].start == 0
    before = torch.tensor(manifest.prefix_ids + (manifest.lead_ids if first else ()), dtype=torch.long)
    if len(before):
        inputs = torch.cat((before.expand(len(group), -1), inputs), dim=1)
    encoded = {
        part: _stored(rows, manifest.parts[part].dtype, group[0])
        for part, rows in adapter.encode(inputs.to(adapter.model.device)).items()
    }
    if prefix and first:
        writer.put_prefix({part: tensor_bytes(rows[0, :prefix]) for part, rows in encoded.items()})
    return {part: rows[:, len(before) :] for part, rows in encoded.items()}


def _stored(rows: Tensor, dtype: str, window: Window) -> Tensor:
    rows = rows.detach().to("cpu", getattr(torch, dtype))
    if not rows.isfinite().all():
        raise EncodingError(
            f"The model gave NaN or infinite values for the window at token {window.start}, stored as {dtype}. "
            'A wider dtype such as "float32" or "bfloat16" may hold them; else the model is at fault.'
        )
    return rows
