"""What the indexes of faiss share: searching by the contract, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import faiss
import torch
from pydantic import BaseModel
from torch import Tensor

from memstore.errors import QueryError
from memstore.interfaces import SavedIndex
from memstore.vectors import checked_queries, padded
from memstore_backends.faiss_gpu import MOST, brought_back, brought_to

HITS = 1 << 22  # keys that are held at once, for all queries together: 50 MiB of scores and ids


class FaissIndex(SavedIndex):
    """An index of faiss, which ``build`` of a subclass fills and gives to :meth:`hold`."""

    unsaved = frozenset({"device"})
    index: Any

    def __init__(self, options: BaseModel | None = None) -> None:
        super().__init__(options)
        self.device: str = getattr(self.options, "device", "cpu")

    def hold(self, index: Any) -> None:
        """Search this index from now on. Raises IndexBuildError if there is no such device."""
        self.num_keys, self.width = index.ntotal, index.d
        self.index = brought_to(self.device, index)

    def parameters(self, k: int) -> Any:
        """What faiss is told of a search for ``k`` keys, by the options of this moment."""
        return None

    def held(self, k: int) -> int:
        """Keys that faiss holds for each query to find ``k``."""
        return k

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        checked = checked_queries(queries, self.width, k).cpu()
        wanted = min(k, self.num_keys)
        if self.device != "cpu" and wanted > MOST:
            raise QueryError(f"k={k}: faiss finds at most {MOST:,} keys on a GPU. Use a smaller k, or device='cpu'.")
        size = checked.abs().amax(1, keepdim=True).clamp_min(1e-30)
        small = checked / size / self.width  # so that no score exceeds the largest number in a key
        found = [self.find(chunk, wanted) for chunk in small.split(max(1, HITS // self.held(wanted)))]
        scores, ids = found[0] if len(found) == 1 else (torch.cat(each) for each in zip(*found, strict=True))
        scores = (scores.double() * self.width * size).float().masked_fill(ids < 0, -torch.inf)
        return padded(scores.to(queries.device), ids.to(queries.device), k)

    def find(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """What faiss finds, scores and ids [m, k] on the CPU; -1 where it finds no key."""
        found = self.index.search(queries.contiguous().numpy(), k, params=self.parameters(k))
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    def save(self, path: Path) -> None:
        index = brought_back(self.device, self.index)
        with path.open("wb") as file:  # by Python, whose OSError says what faiss keeps to itself
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            self.hold(faiss.read_index(faiss.PyCallbackIOReader(file.read)))


class FaissRefinedIndex(FaissIndex):
    """One that scans something small of every key, and scores the best ``k_factor`` times k again.

    ``build`` holds an ``IndexRefine``, or where keys are too few for that, one that scores all.
    """

    tunable: ClassVar = {"k_factor": (1, 2, 4, 8, 16, 32, 64)}
    fewest: ClassVar[int] = 0
    """Keys scored again, however few are asked for."""
    options: Any

    def held(self, k: int) -> int:
        again: int = k * self.options.k_factor
        return min(max(again, self.fewest), self.num_keys)

    def parameters(self, k: int) -> Any:
        if not isinstance(self.index, faiss.IndexRefine):
            return None
        return faiss.IndexRefineSearchParameters(k_factor=self.held(k) / k)
