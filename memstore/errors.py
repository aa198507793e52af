"""Every error that memstore raises on purpose.

Each message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations

MEND = (
    "Run `memstore verify --repair`, or `memstore remove` the memory and read its document again by `memstore index`."
)
"""What to do about a damaged memory: the end of the message of every DamagedMemoryError that names one."""


class MemstoreError(Exception):
    """Base class: catch this to catch everything memstore raises on purpose."""


class ConfigError(MemstoreError):
    """A configuration file, variable or option is wrong. Correct it at the place that the message names, as it says;
    `memstore config show --origin` tells where each value comes from."""


class PluginError(MemstoreError):
    """A backend or adapter is unknown, defined twice, or cannot be loaded. Choose one that the message lists, or
    install what it lacks; `memstore plugins` shows all of them."""


class UnsupportedModelError(MemstoreError):
    """No adapter knows this model, or it has a part that cannot be read exactly. Use a model of a family that the
    message lists, or write an adapter for this one (CONTRIBUTING.md)."""


class ModelLoadError(MemstoreError):
    """A model cannot be loaded by this name. Check the name, or remove the reason, which the message gives in the words
    of transformers."""


class StoreError(MemstoreError):
    """A store cannot be opened, read or written as asked. Correct what the message names: the path, its permissions, or
    the call."""


class StoreNotFoundError(StoreError):
    """There is no store at this path. Check the path; `memstore index` and ``mode="a"`` create one."""


class ReadOnlyStoreError(StoreError):
    """The store was opened read-only, or its directory cannot be written. Open it with ``mode="a"``, as a user who may
    write there, or write to a copy of it."""


class StoreFullError(StoreError):
    """The disk is full. Nothing that was complete is lost; free some space and repeat the command."""


class StoreInUseError(StoreError):
    """A memory of this store is attached or open, or the store is to be mended while it is open. Leave the attachment,
    or close the store, first."""


class ExportError(StoreError):
    """A folder cannot be exported to, or holds no exported memory, or files of one that cannot be read. Name another
    folder, or export the memory again."""


class FormatError(StoreError):
    """The store was written in a format this version cannot read, or its records do not parse. Install the version that
    wrote it, or restore the store from a copy."""


class DamagedMemoryError(StoreError):
    """Bytes on disk differ from those that were written. Run `memstore verify --repair`, which mends the catalog and
    builds indexes anew, and with `--model` reads memories anew whose text is whole; remove others and read their
    documents again, as `memstore index` does."""


class MemoryNotFoundError(StoreError, KeyError):
    """The store holds no memory of this name. Choose one that `memstore list` shows; the message names the nearest."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would print the message in quotes


class MemoryExistsError(StoreError):
    """Another document or model already has this name. Remove it first or choose another name."""


class StoreBusyError(StoreError):
    """Another process is changing the same thing. Wait for it and repeat."""


class MemoryBusyError(StoreBusyError):
    """Another process is encoding under this name. Wait for it or choose another name."""


class DocumentError(MemstoreError):
    """The document cannot be encoded: it is empty, holds no tokens, or its tensors have the wrong shape. Correct what
    the message names, or leave the document out."""


class EncodingError(MemstoreError):
    """The model returned values that must not be stored, such as NaN or infinity. Store or compute in a wider dtype."""


class FingerprintMismatchError(MemstoreError):
    """The memory was written by another model, other weights or another tokenizer. Load those that wrote it, or encode
    the document again; the message names what differs."""


class FingerprintWarning(UserWarning):
    """The same as :class:`FingerprintMismatchError`, when ``strict=False`` asked to read the memory all the same.
    Expect other answers than the model that wrote it would give, and encode the document again to be rid of it."""


class IndexNotice(UserWarning):
    """An index, or the sample of queries that indexes are judged by, had to be made: it was missing, its file was
    damaged, or its options had changed. Nothing is lost; run `memstore reindex` ahead where the time matters."""


class GenericAdapterNotice(UserWarning):
    """No adapter knows this model. It is served because a probe proved that a memory of it is read exactly. Write an
    adapter for it to do without the probe."""


class AttachError(MemstoreError):
    """Memories cannot be attached to this model as asked. Change what the message names; it says what would fit."""


class WindowExceededError(AttachError):
    """Memory, prompt and generated tokens together need more positions than the model has. Ask for fewer of them, or
    let ``when_full="drop"`` forget the oldest."""


class HookError(AttachError):
    """The model ran without calling the attached memory, so its output would silently ignore it. Leave the attention
    implementation as it is while memories are attached."""


class QueryError(MemstoreError):
    """A search was asked with a wrong ``k``, dimension or dtype, or with values that are not finite. Correct what the
    message names: nothing was searched."""


class IndexBuildError(MemstoreError):
    """Keys cannot be indexed as asked: there are none, they differ in shape, are not finite, or an option does not fit
    their number. Change the option that the message names, or choose another backend."""


class CheckError(MemstoreError):
    """An index cannot be checked or tuned as asked: the model gives no sample of what it asks, or a number does not
    fit. Correct the number that the message names, or load the model whole."""


class AssetError(MemstoreError):
    """A model or text for the demo, the tests or the benchmarks could not be had. Install what the message names, or
    put the file where it says."""
