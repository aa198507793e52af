"""Whether memories may be attached to a model, and attaching them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from memstore.errors import AttachError, FingerprintMismatchError, FingerprintWarning, UnsupportedModelError
from memstore.fingerprint import fingerprint, mismatches
from memstore.memory import Memory
from memstore.notices import outside
from memstore.registry import adapter_for
from memstore.rows import unified

if TYPE_CHECKING:
    from pydantic import JsonValue

    from memstore.attachment import Attachment
    from memstore.interfaces import ModelAdapter


def attach(
    model: PreTrainedModel,
    *memories: Memory,
    rows: Sequence[Sequence[Memory]] | None = None,
    strict: bool = True,
    **options: Any,
) -> Attachment:
    """Bind memories to ``model``; read them inside ``with attach(...) as attached:``.

    Several memories are one joint attention. ``rows`` gives every row of a batch its own list instead. ``strict=False``
    turns a fingerprint mismatch into a FingerprintWarning. Further options are those of the kind of memory:
    :class:`memstore.reading.hidden.HiddenAttachment` or :class:`memstore.reading.kv.KvAttachment`.

    Raises UnsupportedModelError, FingerprintMismatchError, or AttachError for what cannot be attached together.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model. Attach to the model itself; of one that is wrapped or "
            "compiled, to that inside."
        )
    if (rows is None) == (not memories):
        raise AttachError("Give at least one memory, or rows=[[…], …] with one list of memories for each batch row.")
    lists = unified([memories] if rows is None else rows)
    adapter = adapter_for(model)(model)
    check_fit({id(memory): memory for row in lists for memory in row}.values(), adapter, strict)
    attachment: Attachment = adapter.attachment(lists, **options)
    attachment.strict = strict
    return attachment


def check_fit(memories: Iterable[Memory], adapter: ModelAdapter, strict: bool) -> None:
    """Raises FingerprintMismatchError if the adapter's model did not write one of the memories; ``strict=False`` warns
    where only the fingerprint differs."""
    facts = fingerprint(adapter)
    for memory in memories:
        _check_fits(memory, adapter, facts, strict)


def _check_fits(memory: Memory, adapter: ModelAdapter, facts: dict[str, JsonValue], strict: bool) -> None:
    name = type(adapter.model).__name__
    if memory.kind != adapter.kind or memory.manifest.parts != adapter.parts(_dtype(memory)):
        raise FingerprintMismatchError(
            f"Memory {memory.name!r} does not have the geometry of this {name}: it was written by "
            f"{memory.fingerprint.get('model_class')} as kind {memory.kind!r}. Attach it to that model."
        )
    differing = mismatches(memory.fingerprint, facts)
    if not differing:
        return
    message = (
        f"Memory {memory.name!r} was not written by this {name}. What differs: {'; '.join(differing)}. "
        "Load the model that wrote it, or encode the document again with this one."
    )
    if strict:
        raise FingerprintMismatchError(message)
    warnings.warn(message, FingerprintWarning, stacklevel=outside())


def _dtype(memory: Memory) -> str:
    return next(iter(memory.manifest.parts.values())).dtype
