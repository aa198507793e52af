"""An index that is kept in a file, to test what is done with such files: exact, of one key in ``step``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from memstore.interfaces import Options, SavedIndex
from memstore.vectors import checked_keys, checked_queries, padded

built: list[int] = []  # the number of keys of every index that was built in this process
loaded: list[int] = []


class KeptOptions(Options):
    scale: float = 1.0  # of the scores: decides what is built
    step: int = Field(default=1, gt=0)
    device: str = "cpu"


class KeptIndex(SavedIndex):
    Options = KeptOptions
    tunable: ClassVar = {"step": (4, 2, 1)}
    unsaved = frozenset({"device"})
    options: KeptOptions

    def build(self, blocks: Sequence[Tensor]) -> None:
        self.num_keys, self.width = checked_keys(blocks)
        self.keys = torch.cat(list(blocks)).float() * self.options.scale
        built.append(self.num_keys)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        seen = self.keys[:: self.options.step]
        found = (checked_queries(queries, self.width, k) @ seen.T).topk(min(k, len(seen)))
        return padded(found.values, found.indices * self.options.step, k)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self.keys.numpy())

    def load(self, path: Path) -> None:
        self.keys = torch.from_numpy(np.load(path, allow_pickle=False))
        self.num_keys, self.width = self.keys.shape
        loaded.append(self.num_keys)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "kept") -> None:
    """Make this backend known by a name through an entry point until the end of the test."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[memstore.backends]\n{name} = tests.kept:KeptIndex\n")
    monkeypatch.syspath_prepend(str(folder))
    built.clear()
    loaded.clear()
