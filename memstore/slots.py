"""What of a memory is searched: one set of keys for encoder states, one for each layer and key-value head else."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memstore.errors import FormatError, StoreError
from memstore.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

    from memstore.open_memory import OpenMemory


class Slot(NamedTuple):
    """One set of keys of a memory, and so one index: that of a layer and key-value head, or of all layers (None)."""

    name: str
    layer: int | None = None
    head: int | None = None

    def keys(self, opened: OpenMemory) -> list[Tensor]:
        """Blocks [n_i, d] of the store: views, nothing is copied. What is stored in int8 or int4 is decoded to float16,
        or to float32 if that is not enough."""
        return self._rows(opened, "keys")

    def values(self, opened: OpenMemory) -> list[Tensor]:
        """What attention sums up, in blocks [n_i, d]: an encoder state is both key and value."""
        return self._rows(opened, "values")

    def _rows(self, opened: OpenMemory, part: str) -> list[Tensor]:
        if self.layer is None:
            return opened.blocks(self.name)
        part = f"{part}.{self.layer}"
        if not opened.manifest.parts[part].is_coded:
            return [block[:, self.head] for block in opened.blocks(part)]
        count = opened.manifest.num_blocks
        blocks = [opened.block(part, i)[:, self.head].half() for i in range(count)]  # one float32 block at a time
        if all(bool(block.isfinite().all()) for block in blocks):
            return blocks
        return [opened.block(part, i)[:, self.head].clone() for i in range(count)]


def slot_name(layer: int, head: int) -> str:
    """The name of the slot of a layer and key-value head."""
    return f"keys.{layer}.{head}"


def slots(manifest: Manifest) -> list[Slot]:
    """The slots of a memory, layer by layer. Raises StoreError for a kind of memory that is not searched, FormatError
    for one whose parts are not those of its kind, as nothing but a stranger's program writes."""
    parts = manifest.parts
    if manifest.kind == "hidden":
        if "hidden" not in parts or len(parts["hidden"].shape) != 1:
            raise FormatError(f"Memory {manifest.name!r} has parts that are not those of encoder states: {[*parts]}.")
        return [Slot("hidden")]
    if manifest.kind != "kv":
        raise StoreError(f"Memory {manifest.name!r} is of kind {manifest.kind!r}, which no index searches.")
    try:
        shapes = {int(part[5:]): spec.shape for part, spec in parts.items() if part.startswith("keys.")}
        if not shapes or any(f"values.{layer}" not in parts for layer in shapes):
            raise ValueError(f"{[*parts]}")
        return [
            Slot(slot_name(layer, g), layer, g) for layer, (heads, _) in sorted(shapes.items()) for g in range(heads)
        ]
    except ValueError as error:
        raise FormatError(
            f"Memory {manifest.name!r} has parts that are not those of keys and values: {error}."
        ) from error
