"""Keys like those of a model, queries unlike them, and what a search should find."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch


def mismatched(n, d=32, m=24, mean=2.0, spread=0.3, seed=0):
    """Keys [n, d] in clusters, with a common mean and unequal lengths; queries [m, d], a linear map of other points."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    centers, common = normal(50, d), mean * normal(1, d)

    def points(count):
        return centers[torch.randint(50, (count,), generator=generator)] + 0.7 * normal(count, d) + common

    keys = points(n) * torch.exp(spread * normal(n, 1))
    return keys, points(m) @ normal(d, d) / d**0.5


def exact_ids(keys, queries, k):
    """The ids of the best keys, best first, in double precision."""
    scores = queries.double().numpy() @ keys.double().numpy().T
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def recall(ids, best):
    """The share of the best that was found."""
    return np.mean(
        [len(set(found) & set(wanted)) / len(wanted) for found, wanted in zip(ids.tolist(), best, strict=True)]
    )


def built(cls, blocks, **options):
    index = cls(cls.Options(**options))
    index.build(blocks)
    return index


def digest(index, path: Path):
    """What tells the file of an index from others."""
    index.save(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of_a_build(cls, dtype, path: Path):
    """The same from nothing, for another process to call."""
    return digest(built(cls, mismatched(2000)[0].to(dtype).split(700)), path)


def check_errors_of_files(index, folder, num_keys):
    """What cannot be written or read is an OSError, after which the index is as good as before."""
    if Path("/dev/full").exists():
        with pytest.raises(OSError) as caught:
            index.save(Path("/dev/full"))
        assert caught.value.errno == errno.ENOSPC
    for act in (index.save, index.load):
        with pytest.raises(FileNotFoundError):
            act(folder / "nowhere" / "index")
    index.save(folder / "index")
    index.load(folder / "index")
    assert index.num_keys == num_keys
