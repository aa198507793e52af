"""A synthetic mixture of keys, and queries that are distributed otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memstore.assets import build_once, cache_dir

QUERIES = 1024  # kept for each dataset
SEED = 3
SIZES = {512: 1_000_000, 768: 200_000}  # keys of each width
FOUND = 0.3  # how much of a query is the point that it asks for
SHARPNESS = 4.0  # standard deviation of its scores: the best 256 of 200,000 hold most of the attention


def folder(which: str) -> Path:
    """A folder with keys [n, d] float16 and queries [m, d] float32."""
    return build_once(cache_dir() / "bench" / f"mixed-{which}", lambda target: _mix(int(which), target))


def _mix(width: int, target: Path) -> None:
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.arange(1, width + 1).float() ** -0.5  # a few directions hold most of the variance, as in a model
    basis = torch.linalg.qr(normal(width, width)).Q * spread
    mean, centres = 2 * normal(width) * spread.norm() / width**0.5, normal(1000, width)
    sizes = torch.rand(1000, generator=generator) ** 2  # some places are crowded
    turn = torch.linalg.qr(normal(width, width)).Q

    def points(count: int) -> Tensor:
        cluster = torch.multinomial(sizes, count, replacement=True, generator=generator)
        return (0.7 * centres[cluster] + 0.7 * normal(count, width)) @ basis.T

    rows = SIZES[width]
    keys = np.lib.format.open_memmap(target / "keys.npy", "w+", np.float16, (rows, width))
    for start in range(0, rows, 50_000):
        keys[start : start + 50_000] = (mean + points(min(50_000, rows - start))).half().numpy()
    keys.flush()
    asks = points(QUERIES)
    asks = FOUND * asks + (1 - FOUND) * asks @ turn + mean @ turn
    scores = asks @ torch.from_numpy(keys[:: rows // 10_000]).float().T
    np.save(target / "queries.npy", (asks * SHARPNESS / scores.std(1, keepdim=True)).numpy())


def some(queries: Tensor) -> np.ndarray:
    """QUERIES of queries [..., m, c] at random."""
    chosen = torch.randperm(queries.shape[-2], generator=torch.Generator().manual_seed(SEED))[:QUERIES]
    assert len(chosen) == QUERIES, f"only {queries.shape[-2]} queries"
    return queries[..., chosen, :].numpy()
