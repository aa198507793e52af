"""Rotary positions (RoFormer, Su et al. 2021): keys are stored before rotation, so a document can stand anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter


def _half_turn(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) over the two halves of the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, T, c] to the positions of cos and sin [B, T, r]; channels past r are not rotary."""
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((turned * cos + _half_turn(turned) * sin, rest), dim=-1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo :func:`rotate` in float32.

    The inverse of a rotation scaled by s is its transpose over s^2. s^2 = cos^2 + sin^2 holds YaRN's attention scaling,
    and also the rounding of cos and sin in a half-precision model, which would not cancel otherwise.
    """
    cos, sin = cos.float(), sin.float()
    scale = cos.square() + sin.square()
    return rotate(x.float(), cos / scale, -sin / scale)


DISTANCE = (
    4096  # between query and keys, at most half the native window; at distance 0 near-by habits drown the content
)


def turned(adapter: DecoderOnlyAdapter, query: Tensor, positions: Tensor) -> Tensor:
    """The query [b, H, T, c], rotated to positions [b, T], as it asks keys that are not rotated: float32."""
    cos, sin = adapter.rotary(query, positions)
    plain = unrotate(query, cos, sin)
    distance = min(DISTANCE, adapter.native_window // 2)
    cos, sin = adapter.rotary(plain, torch.full_like(positions, distance))
    return rotate(plain, cos, sin)
