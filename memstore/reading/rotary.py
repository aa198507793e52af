"""Rotary positions (RoFormer, Su et al. 2021): keys are stored before rotation, so a document can stand anywhere."""

from __future__ import annotations

import torch
from torch import Tensor


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
