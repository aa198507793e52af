"""Rotary positions (RoFormer, Su et al. 2021): keys are stored before rotation, so a document can stand anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter

CHANGING = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of what is read
FROZEN = "frozen"


def _half_turn(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) over the two halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, T, c] to the positions of cos and sin [B, T, r]; channels past r are not rotary."""
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = turned * cos + _half_turn(turned) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo :func:`rotate` in float32.

    The inverse of a rotation scaled by s is its transpose over s^2. s^2 = cos^2 + sin^2 holds YaRN's attention scaling,
    and also the rounding of cos and sin in a half-precision model, which would not cancel otherwise.
    """
    cos, sin = cos.float(), sin.float()
    scale = cos.square() + sin.square()
    return rotate(x.float(), cos / scale, -sin / scale)


# Between query and keys, at most half of what a layer sees; at distance 0 near-by habits drown the content.
DISTANCE = 4096


def turned(adapter: DecoderOnlyAdapter, layer: int, query: Tensor, positions: Tensor) -> Tensor:
    """The query [b, H, T, c] of a layer, rotated to positions [b, T], as it asks keys that are not rotated: float32."""
    reach = min(adapter.native_window, adapter.sliding_window(layer) or adapter.native_window)
    return moved(adapter, layer, query, positions, torch.full_like(positions, min(DISTANCE, reach // 2)))


def moved(adapter: DecoderOnlyAdapter, layer: int, query: Tensor, positions: Tensor, to: Tensor) -> Tensor:
    """The query [b, H, T, c] of a layer, rotated to positions [b, T], as if it stood at positions ``to``: float32."""
    plain = unrotate(query, *adapter.rotary_at(layer, query, positions))
    return rotate(plain, *adapter.rotary_at(layer, plain, to))


def rope_types(rotary: nn.Module) -> dict[str, str]:
    """The types of a rotary module's frequencies, by name: one named "", or one for each kind of layer."""
    types = getattr(rotary, "rope_type", "default")
    return dict(types) if isinstance(types, dict) else {"": str(types)}


def is_changing(rope_type: str) -> bool:
    """Whether such frequencies change with the length of what is read."""
    return any(word in rope_type for word in CHANGING)


def frequencies(rotary: nn.Module) -> Tensor:
    """All frequencies of a rotary module [f], the frozen ones where they change, and the factors of its cos and sin
    that are not 1. What it has read so far changes nothing of it."""
    found: list[Tensor] = []
    for name, rope_type in sorted(rope_types(rotary).items()):
        found.append(getattr(rotary, _named(name, "original_inv_freq" if is_changing(rope_type) else "inv_freq")))
        factor = float(getattr(rotary, _named(name, "attention_scaling"), 1.0))
        found.append(found[-1].new_tensor([] if factor == 1 else [factor]))
    return torch.cat(found)


@contextmanager
def frozen(rotary: nn.Module) -> Iterator[None]:
    """Inside, frequencies of the types "dynamic" and "longrope" are those of the original window, whatever is read.

    Stored keys were turned back by them, so they must be the same for every length, and whatever the model has read
    before. Afterwards all is as it was.
    """
    types = rope_types(rotary)
    changing = [name for name, rope_type in types.items() if is_changing(rope_type)]
    before: dict[str, Any] = {"rope_type": getattr(rotary, "rope_type", None)}
    for name in changing:
        key = _named(name, "inv_freq")
        before[key] = getattr(rotary, key)
        setattr(rotary, key, getattr(rotary, _named(name, "original_inv_freq")).to(before[key].device))
    if changing:
        held = types | dict.fromkeys(changing, FROZEN)
        cast(Any, rotary).rope_type = held if isinstance(before["rope_type"], dict) else FROZEN
    try:
        yield
    finally:
        for key, value in before.items() if changing else ():
            setattr(rotary, key, value)


def _named(name: str, what: str) -> str:
    return f"{name}_{what}" if name else what
