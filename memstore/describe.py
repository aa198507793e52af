"""What a memory is going to be: the document's tokens, how it is cut, and the manifest that says so."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from memstore.catalog import check_name
from memstore.errors import ConfigError, DocumentError
from memstore.fingerprint import fingerprint, tensor_bytes
from memstore.manifest import Manifest, PartSpec, WindowRule, storable
from memstore.memory import Document, text_digest
from memstore.text import tokenize
from memstore.windows import anchors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter

BATCH = 4  # windows read at once
REACH = 2  # windows on either side of an anchor: sections of about four, so that few of their windows are not full
BLOCK_BYTES = 64 << 20  # of all parts together; a block is what one commit writes and what a crash can cost


def describe(
    adapter: ModelAdapter,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | None,
    input_ids: Any,
    input_features: Tensor | None,
    *,
    name: str,
    metadata: Mapping[str, Any] | None,
    window: int | None,
    overlap: int | None,
    dtype: str | torch.dtype | None,
    batch_size: int | None,
    anchored: bool = False,
) -> tuple[Manifest, Document, Tensor]:
    """The draft of a manifest, the document to keep, and what the model reads: token ids [n] or features [windows, …].

    Raises DocumentError and ConfigError; see :func:`memstore.encode.encode`.
    """
    check_name(name)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise DocumentError(f"metadata={metadata!r} must be a mapping, such as {{'author': 'unknown'}}.")
    if sum(given is not None for given in (text, input_ids, input_features)) != 1:
        raise DocumentError("Give exactly one of text (with a tokenizer), input_ids and input_features.")
    features, feature_tokens = (None, 0) if input_features is None else adapter.feature_windows(input_features)
    if features is None and not adapter.vocab_size:
        raise DocumentError(f"{type(adapter.model).__name__} reads input_features, not text or token ids.")
    document = _document(tokenizer, text, input_ids, adapter.vocab_size)
    rule = adapter.rule(feature_tokens or window, 0 if feature_tokens else overlap)
    if anchored and features is None and not adapter.whole_only:
        rule = rule.model_copy(update={"anchors": REACH * rule.window})
    if features is None:
        assert document.token_ids is not None
        num_tokens = len(document.token_ids)
    else:
        num_tokens = len(features) * feature_tokens
    if adapter.whole_only and num_tokens > rule.window:
        raise DocumentError(
            f"The document {name!r} has {num_tokens} tokens, more than the window of {rule.window}, and "
            f"{type(adapter.model).__name__} cannot read one in several windows: {adapter.whole_only}. Store its parts "
            f"as documents of their own; the model has {adapter.native_window} positions."
        )
    prefix = adapter.prefix(tokenizer) if tokenizer is not None and num_tokens > rule.window else []
    if prefix and _begins_twice(document, prefix):
        document = Document(document.text, document.token_ids[1:], document.offsets[1:])  # type: ignore[index]
        num_tokens -= 1
    room = adapter.native_window - rule.window - len(prefix)
    if prefix and room < 0:
        raise ConfigError(
            f"window={rule.window} leaves no room for the {len(prefix)} tokens of the chat template's header, which "
            f"stand before every window; the model has {adapter.native_window} positions."
        )
    parts = adapter.parts(_dtype_name(dtype, adapter))
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
        closing_ids=() if tokenizer is None else tuple(adapter.closing(tokenizer)),
        lead_ids=_lead(document, rule, room) if prefix else (),
        anchors=() if document.token_ids is None else anchors(document.token_ids, rule),
        batch_size=BATCH if batch_size is None else batch_size,
        device=adapter.model.device.type,
        fingerprint=fingerprint(adapter, tokenizer),
        document_digest=_digest(document, features),
        has_text=text is not None,
        has_ids=document.token_ids is not None,
        metadata=dict(metadata or {}),
    )
    source = features if features is not None else torch.from_numpy(np.asarray(document.token_ids)).long()
    return draft, document, source


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
    return Manifest.described(fields)


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


def _dtype_name(dtype: str | torch.dtype | None, adapter: ModelAdapter) -> str:
    name = str(adapter.model.dtype if dtype is None else dtype).removeprefix("torch.")
    possible = storable(adapter.kind)
    if name not in possible:
        raise ConfigError(f"dtype={name!r}: memories of kind {adapter.kind!r} are stored as {', '.join(possible)}.")
    return name


def _block_tokens(parts: Mapping[str, PartSpec]) -> int:
    """Tokens of a block: a power of two between 256 and 16,384 that keeps a block under BLOCK_BYTES."""
    fitting = 256 * BLOCK_BYTES // sum(part.num_bytes(256) for part in parts.values())
    return max(256, min(16384, 1 << max(fitting, 1).bit_length() - 1))


def _digest(document: Document, features: Tensor | None) -> str:
    if document.text is not None:
        return text_digest(document.text)
    digest = xxh3_128()
    if document.token_ids is not None:
        digest.update(document.token_ids.tobytes())
    elif features is not None:
        digest.update(tensor_bytes(features))
    return digest.hexdigest()
