"""Every index backend keeps the contract."""

from __future__ import annotations

from memstore.testing import VectorIndexContract
from memstore_backends.exact import ExactIndex
from memstore_backends.faiss_flat import FaissFlatIndex
from memstore_backends.faiss_ivf import FaissIvfIndex
from memstore_backends.faiss_pca import FaissPcaIndex
from memstore_backends.faiss_pq import FaissPqIndex
from memstore_backends.hnsw import HnswIndex


class TestExact(VectorIndexContract):
    index = ExactIndex


class TestFaissFlat(VectorIndexContract):
    index = FaissFlatIndex


class TestFaissIvf(VectorIndexContract):
    index = FaissIvfIndex
    min_recall = 0.98


class TestFaissPca(VectorIndexContract):
    index = FaissPcaIndex
    options = {"components": 28, "k_factor": 16}  # the kit's keys differ in every direction alike
    min_recall = 0.98


class TestFaissPq(VectorIndexContract):
    index = FaissPqIndex
    min_recall = 0.98
    score_tolerance = 1e-3  # float32 keys are kept as halves


class TestHnsw(VectorIndexContract):
    index = HnswIndex
    min_recall = 0.98
