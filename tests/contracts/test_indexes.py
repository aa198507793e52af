"""Every index backend keeps the contract."""

from __future__ import annotations

from memstore.testing import VectorIndexContract
from memstore_backends.exact import ExactIndex


class TestExact(VectorIndexContract):
    index = ExactIndex
