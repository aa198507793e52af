"""Inverted lists with faiss, on the CPU or a GPU: a query reads the lists whose centroids suit it best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import faiss
import torch
from pydantic import Field
from torch import Tensor

from memstore.errors import IndexBuildError
from memstore.vectors import checked_keys, float_chunks, sample
from memstore_backends.faiss_gpu import MOST, DeviceOptions, find_gpu
from memstore_backends.faiss_index import FaissIndex
from memstore_backends.faiss_keys import HALVES, check_sizes

TRAINING = 32  # keys per list that k-means sees
ROUNDS = 10  # of k-means


class FaissIvfOptions(DeviceOptions):
    """``nlist``: how many lists, None for about 4 sqrt(n). ``nprobe``: how many of them a query reads.

    ``seed`` decides what is learned.
    """

    nlist: int | None = Field(None, gt=0, lt=2**31)
    nprobe: int = Field(128, gt=0, lt=2**31)
    seed: int = Field(0, ge=0, lt=2**31)


class FaissIvfIndex(FaissIndex):
    """Keys are listed by the nearest of ``nlist`` centroids; a query reads the lists of highest inner product.

    Centroids are those of k-means by distance: keys of a model have much in common and differ in length, and by inner
    product most of them would be listed with the few longest centroids.
    """

    Options = FaissIvfOptions
    tunable: ClassVar = {"nprobe": (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)}
    options: FaissIvfOptions

    def build(self, blocks: Sequence[Tensor]) -> None:
        n, d = checked_keys(blocks)
        nlist = self.options.nlist or max(1, min(round(4 * n**0.5), n // 16))
        if nlist > n:
            raise IndexBuildError(f"nlist={nlist} is more than the {n} keys. Use at most {n}, or leave it out.")
        find_gpu(self.device)
        check_sizes(blocks)
        kmeans = faiss.Kmeans(d, nlist, niter=ROUNDS, seed=self.options.seed, min_points_per_centroid=1)
        kmeans.train(sample(blocks, TRAINING * nlist, self.options.seed).numpy())
        nearest = faiss.IndexFlatL2(d)
        nearest.add(kmeans.centroids)
        listed = torch.empty((n, 1), dtype=torch.int64)
        for start, chunk in float_chunks(blocks):
            listed[start : start + len(chunk)] = torch.from_numpy(nearest.search(chunk.numpy(), 1)[1])
        used, listed, sizes = listed.unique(return_inverse=True, return_counts=True)  # without lists that are empty
        index = self._empty(torch.from_numpy(kmeans.centroids)[used], blocks[0].dtype)
        for number, size in enumerate(sizes.tolist()):  # makes room, because a vector that grows is held twice
            index.invlists.resize(number, size)
            index.invlists.resize(number, 0)
        for start, chunk in float_chunks(blocks):
            here = listed[start : start + len(chunk)]
            index.add_core(len(chunk), faiss.swig_ptr(chunk.numpy()), None, faiss.swig_ptr(here.numpy()))
        self.hold(index)

    def parameters(self, k: int) -> Any:
        most = self.index.nlist if self.device == "cpu" else min(self.index.nlist, MOST)
        return faiss.SearchParametersIVF(nprobe=min(self.options.nprobe, most))

    def _empty(self, centroids: Tensor, dtype: torch.dtype) -> Any:
        nlist, d = centroids.shape
        quantizer = faiss.IndexFlatIP(d)
        quantizer.add(centroids.numpy())
        if dtype == torch.float32:
            return faiss.IndexIVFFlat(quantizer, d, nlist, faiss.METRIC_INNER_PRODUCT)
        index = faiss.IndexIVFScalarQuantizer(quantizer, d, nlist, HALVES[dtype], faiss.METRIC_INNER_PRODUCT, False)
        index.is_trained = True  # nothing needs to be learned of halves
        return index
