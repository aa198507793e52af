"""A navigable graph of the keys (HNSW), with hnswlib on the CPU."""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import hnswlib
import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import pad

from memstore.interfaces import Options, SavedIndex
from memstore.vectors import CHUNK, best_so_far, checked_keys, checked_queries, float_chunks, padded

LARGE = 2.0**50  # to which keys and queries are brought: hnswlib computes 1 - score, in which small scores would drown
ID_BITS, BIAS = 40, 256  # a label is an id, and above it the exponent of the keys: hnswlib's file has no other room
HEADER = struct.Struct("<6QiI3QdQ")  # of hnswlib's file, before its elements


class HnswOptions(Options):
    """``m``: links of a key; ``ef_construction``, ``ef_search``: keys held in view while building and searching."""

    m: int = Field(16, ge=2, le=1024)
    ef_construction: int = Field(200, gt=0, lt=2**31)
    ef_search: int = Field(512, gt=0, lt=2**31)
    seed: int = Field(0, ge=0, lt=2**31)


class HnswIndex(SavedIndex):
    """Keys are linked by distance, and a query walks from key to key of ever higher inner product; all in float32.

    Linked by inner product, nearly all keys would have the same few long ones for neighbours, and most could not be
    reached. So a key gets one more number, which makes all equally long, and which is 0 in a query.

    With one thread the graph depends on keys, options and seed alone. torch's further threads speed building up, and
    link keys in an order that no seed decides.
    """

    Options = HnswOptions
    tunable: ClassVar = {"ef_search": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)}
    options: HnswOptions

    def __init__(self, options: BaseModel | None = None) -> None:
        super().__init__(options)
        self._one = threading.Lock()  # hnswlib keeps how far a search looks in the index, not in the search

    def build(self, blocks: Sequence[Tensor]) -> None:
        self.num_keys, self.width = checked_keys(blocks)
        longest = max(float(chunk.double().norm(dim=1).amax()) for _, chunk in float_chunks(blocks))
        self._exponent = max(-60, math.frexp(longest)[1])
        self._index = hnswlib.Index(space="ip", dim=self.width + 1)
        self._index.init_index(self.num_keys, self.options.m, self.options.ef_construction, self.options.seed)
        for start, chunk in float_chunks(blocks):
            keys = chunk * (LARGE / 2.0**self._exponent)
            keys = torch.cat((keys, (4 * LARGE**2 - keys.square().sum(1, keepdim=True)).sqrt()), dim=1)
            labels = self._labels(start, start + len(keys))
            self._index.add_items(keys.numpy(), labels, num_threads=torch.get_num_threads())

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        checked = checked_queries(queries, self.width, k).cpu()
        size = checked.abs().amax(1, keepdim=True).clamp_min(1e-30)
        scores, ids = self._search(pad(checked / size * LARGE, (0, 1)), min(k, self.num_keys))
        scores = (scores.double() / LARGE * (2.0**self._exponent / LARGE) * size).float()  # only the result has to fit
        return padded(scores.to(queries.device), ids.to(queries.device), k)

    def save(self, path: Path) -> None:
        path.open("wb").close()  # raises what hnswlib would keep to itself
        self._index.save_index(str(path))
        if path.stat().st_size < self._index.index_file_size():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            _, room, self.num_keys, size, label_at, key_at, *_ = HEADER.unpack(file.read(HEADER.size))
            if room != self.num_keys or HEADER.size + room * size > path.stat().st_size or not key_at < label_at < size:
                raise ValueError("its header speaks of more than the file holds")  # for which hnswlib would make room
            file.seek(label_at, os.SEEK_CUR)
            self._exponent = (int.from_bytes(file.read(8), "little") >> ID_BITS) - BIAS
        self.width = (label_at - key_at) // 4 - 1
        self._index = hnswlib.Index(space="ip", dim=self.width + 1)
        self._index.load_index(str(path))

    def _search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        try:
            with self._one:
                self._index.set_ef(max(k, self.options.ef_search))
                labels, distances = self._index.knn_query(queries.numpy(), k, num_threads=torch.get_num_threads())
        except RuntimeError:  # the graph leads to fewer than k keys
            return self._scan(queries, k)
        return 1 - torch.from_numpy(distances), torch.from_numpy(labels.view(np.int64)) & (1 << ID_BITS) - 1

    def _scan(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As _search, by scoring every key."""
        best = queries[:, :0], torch.empty((len(queries), 0), dtype=torch.int64)
        for chunk in torch.arange(self.num_keys).split(max(1, CHUNK // self.width)):
            start = int(chunk[0])
            keys = torch.from_numpy(self._index.get_items(self._labels(start, start + len(chunk))))
            best = best_so_far(best, queries @ keys.T, start, k)
        scores, order = best[0].sort(1, descending=True)
        return scores, best[1].gather(1, order)

    def _labels(self, start: int, end: int) -> Any:
        return np.arange(start, end) + (self._exponent + BIAS << ID_BITS)
