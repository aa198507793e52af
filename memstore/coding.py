"""Keys and values as small whole numbers: codes, and the scales that they are multiplied by.

Keys differ in size from channel to channel, values from token to token (KIVI, Liu et al. 2024). So GROUP keys share a
scale in each channel, and the channels of one value of one head share one. A scale is a bfloat16, which has the range
of float32.

- int8: x is kept as round(x / s), with s the largest |x| over 127.
- int4: x is kept as round((x - o) / s), with o the smallest x, and s what is left up to the largest over 15; o is a
  bfloat16 too. Value i of a token shares a byte with value i + half, half the values of a token.

The record of a part is its scales, then (int4) its offsets, then its codes. Groups begin with the record, so it can be
read alone; its last group may have fewer rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.fingerprint import tensor_bytes
from memstore.manifest import GROUP, PartSpec

LARGEST = 1e38  # number that is coded: what is decoded must still be a float32
TOP = {"int8": 127, "int4": 15}


def encoded(rows: Tensor, spec: PartSpec) -> memoryview:
    """The record of rows [n, *shape], finite and on the CPU; what is coded is float32 and at most LARGEST in size."""
    if not spec.is_coded:
        return tensor_bytes(rows.to(getattr(torch, spec.dtype)))
    n, shared = len(rows), _shared(rows, spec)
    low, high = shared.amin(1, keepdim=True), shared.amax(1, keepdim=True)
    top = TOP[spec.dtype]
    if spec.dtype == "int8":
        scales = (torch.maximum(high, -low) / top).bfloat16()
        tables = [scales]
        codes = (shared / _divisors(scales)).round_().clamp_(-top, top)
    else:
        offsets = low.bfloat16()
        scales = (high / top - offsets.float() / top).clamp_min(0).bfloat16()
        tables = [scales, offsets]
        codes = (shared / _divisors(scales) - offsets.float() / _divisors(scales)).round_().clamp_(0, top)
    codes = codes.flatten(0, 1)[:n] if spec.scales != "token" else codes
    packed = [table.view(torch.uint8).flatten() for table in tables]
    return tensor_bytes(torch.cat([*packed, _packed(codes.reshape(n, -1), spec).flatten()]))


def decoded(record: Tensor, spec: PartSpec, n: int, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` [stop - start, *shape], float32, of a record of n rows: bytes, uint8 [size].

    Only the codes and scales of these rows are read.
    """
    size = 2 * spec.num_scales(n)
    tables = 2 if spec.dtype == "int4" else 1
    codes = record[tables * size :].view(n, -1)[start:stop]
    rows = _unpacked(codes, spec).float().view(stop - start, *spec.shape)
    scales, offsets = (
        _for_rows(record[i * size : (i + 1) * size].view(torch.bfloat16), spec, start, stop) if i < tables else None
        for i in range(2)
    )
    assert scales is not None
    rows *= scales
    return rows if offsets is None else rows.add_(offsets)


def _shared(rows: Tensor, spec: PartSpec) -> Tensor:
    """[n, *shape] -> what shares a scale, along dimension 1: [groups, GROUP, values], or [n · heads, c] for values."""
    if spec.scales == "token":
        return rows.reshape(-1, spec.shape[-1])
    flat = rows.reshape(len(rows), -1)
    missing = -len(rows) % GROUP
    if missing:  # by the last row, which changes no scale
        flat = torch.cat((flat, flat[-1:].expand(missing, -1)))
    return flat.view(-1, GROUP, flat.shape[1])


def _for_rows(table: Tensor, spec: PartSpec, start: int, stop: int) -> Tensor:
    """The scales or offsets of these rows, float32, of a shape that fits [stop - start, *shape]."""
    if spec.scales == "token":
        return table.view(-1, *spec.shape[:-1], 1)[start:stop].float()
    first = start // GROUP
    groups = table.view(-1, *spec.shape)[first : -(-stop // GROUP)].float()
    return groups.repeat_interleave(GROUP, dim=0)[start - first * GROUP : stop - first * GROUP]


def _divisors(scales: Tensor) -> Tensor:
    """The scales as float32, with 1 for those of nothing but zeros, whose codes do not matter."""
    return scales.float().masked_fill(scales == 0, 1)


def _packed(codes: Tensor, spec: PartSpec) -> Tensor:
    """Codes [n, values] as bytes [n, bytes]."""
    if spec.dtype == "int8":
        return codes.to(torch.int8).view(torch.uint8)
    half = -(-codes.shape[1] // 2)
    whole = pad(codes.to(torch.uint8), (0, 2 * half - codes.shape[1]))
    return whole[:, :half] | whole[:, half:] << 4


def _unpacked(codes: Tensor, spec: PartSpec) -> Tensor:
    """Codes [n, values] of bytes [n, bytes]."""
    if spec.dtype == "int8":
        return codes.view(torch.int8)
    return torch.cat((codes & 15, codes >> 4), dim=1)[:, : math.prod(spec.shape)]
