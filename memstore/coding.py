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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


class Stretch(NamedTuple):
    """Rows ``start`` to ``stop`` of a record of n rows: bytes, uint8 [size]."""

    record: Tensor
    n: int
    start: int
    stop: int


def decoded(stretches: Sequence[Stretch], spec: PartSpec) -> Tensor:
    """The rows of these stretches one after another, at least one: [rows, *shape], float32.

    Only their codes and scales are read. Many are decoded faster together.
    """
    tables = 2 if spec.dtype == "int4" else 1
    codes = torch.cat([_codes(each, spec, tables) for each in stretches])
    rows = _unpacked(codes, spec).float().view(-1, *spec.shape)
    scales, *offsets = (torch.cat([_table(each, spec, i) for each in stretches]).float() for i in range(tables))
    if spec.scales == "token":
        rows *= scales
        return rows.add_(*offsets) if offsets else rows
    for i, group in enumerate(rows.split([count for each in stretches for count in _groups(each)])):
        group *= scales[i]
        for offset in offsets:
            group += offset[i]
    return rows


def _codes(stretch: Stretch, spec: PartSpec, tables: int) -> Tensor:
    """[stop - start, bytes]."""
    record, n, start, stop = stretch
    return record[2 * tables * spec.num_scales(n) :].view(n, -1)[start:stop]


def _table(stretch: Stretch, spec: PartSpec, i: int) -> Tensor:
    """Scales (i = 0) or offsets (1), bfloat16: [rows, heads, 1], or [groups, *shape] of the groups that are touched."""
    record, n, start, stop = stretch
    size = 2 * spec.num_scales(n)
    table = record[i * size : (i + 1) * size].view(torch.bfloat16)
    if spec.scales == "token":
        return table.view(-1, *spec.shape[:-1], 1)[start:stop]
    return table.view(-1, *spec.shape)[start // GROUP : -(-stop // GROUP)]


def _groups(stretch: Stretch) -> Iterator[int]:
    """How many rows of the stretch each group has that it touches."""
    for first in range(stretch.start // GROUP * GROUP, stretch.stop, GROUP):
        yield min(first + GROUP, stretch.stop) - max(first, stretch.start)


def _shared(rows: Tensor, spec: PartSpec) -> Tensor:
    """[n, *shape] -> what shares a scale, along dimension 1: [groups, GROUP, values], or [n · heads, c] for values."""
    if spec.scales == "token":
        return rows.reshape(-1, spec.shape[-1])
    flat = rows.reshape(len(rows), -1)
    missing = -len(rows) % GROUP
    if missing:  # by the last row, which changes no scale
        flat = torch.cat((flat, flat[-1:].expand(missing, -1)))
    return flat.view(-1, GROUP, flat.shape[1])


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
