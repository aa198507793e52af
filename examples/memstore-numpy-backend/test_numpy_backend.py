"""The backend keeps the contract of memstore."""

from memstore.testing import VectorIndexContract
from memstore_numpy_backend import NumpyIndex


class TestNumpyIndex(VectorIndexContract):
    index = NumpyIndex
    options = {"chunk": 7}
