"""The sample of queries that a memory carries: made once, and kept in a file beside its records.

The file is a safetensors file, [m, H, d] for each layer. Its metadata holds a checksum of the tensors, and a hash of
the model's weights: a decoder that was trained further asks other things of the same encoder states.
"""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memstore.errors import IndexNotice
from memstore.files import replace_by
from memstore.fingerprint import tensors_hash
from memstore.interfaces import RecordStore
from memstore.notices import outside
from memstore.open_memory import OpenMemory

if TYPE_CHECKING:
    from memstore.interfaces import ModelAdapter

FILE = "queries.safetensors"
FORMAT = "1"

Sample = dict[int, Tensor]  # layer -> [m, H, d]

_unwritten: WeakKeyDictionary[RecordStore, dict[tuple[str, str], Sample]] = WeakKeyDictionary()  # by memory and model


def query_sample(opened: OpenMemory, adapter: ModelAdapter) -> Sample:
    """What the adapter's model asks of this memory, {layer: [m, H, d]}: see :meth:`ModelAdapter.queries`.

    It is made at the first call and kept with the memory, so that later processes find it. Where nothing can be
    written it is kept for this process. One that is damaged or of another model is made anew, with an IndexNotice.
    Raises what :meth:`ModelAdapter.queries` raises.
    """
    memory, store = opened.memory, opened.memory.store
    model = tensors_hash(adapter.model.state_dict())
    unwritten = _unwritten.setdefault(store.records, {})
    key = (memory.manifest.id, model)
    if key in unwritten:
        return unwritten[key]
    folder = store.records.folder(memory.manifest.id)
    if folder is not None and (folder / FILE).exists():
        try:
            return _load(folder / FILE, model)
        except ValueError as error:
            _notice(f"The sample of queries of memory {memory.name!r} {error}; it is made anew.")
    sample = adapter.queries(opened)
    if folder is None or store.mode == "r":
        unwritten[key] = sample
        return sample
    try:
        _save(folder / FILE, sample, model)
    except OSError as error:
        unwritten[key] = sample
        _notice(
            f"The sample of queries of memory {memory.name!r} cannot be written ({error.strerror}): it lasts as long "
            "as this process, and the next one makes it again."
        )
    return sample


def _load(path: Path, model: str) -> Sample:
    """Raises ValueError, which says why the file is of no use."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot be read ({error})") from error
    if metadata.get("checksum") != tensors_hash(tensors):
        raise ValueError("is damaged")
    if metadata.get("format") != FORMAT:
        raise ValueError("was written by another version of memstore")
    if metadata.get("model") != model:
        raise ValueError("is that of a model with other weights")
    return {int(name): tensor for name, tensor in tensors.items()}


def _save(path: Path, sample: Sample, model: str) -> None:
    tensors = {str(layer): queries for layer, queries in sample.items()}
    data = save(tensors, {"format": FORMAT, "model": model, "checksum": tensors_hash(tensors)})
    for left in path.parent.glob(f".{path.name}.*"):  # by a killed process; one at work only gets a notice
        left.unlink(missing_ok=True)
    replace_by(path, [data], path.with_name(f".{path.name}.{uuid.uuid4().hex}"))


def _notice(message: str) -> None:
    warnings.warn(message, IndexNotice, stacklevel=outside())
