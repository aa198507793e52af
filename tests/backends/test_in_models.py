"""Every index that is kept, in a store and in a model: built once, loaded again, and reading what `exact` reads."""

from __future__ import annotations

import warnings

import pytest
import torch

import memstore
from memstore.errors import IndexNotice, StoreFullError
from memstore.indexes import open_index
from memstore.interfaces import SavedIndex
from tests.models import build, read, run

BACKENDS = ["faiss-flat", "faiss-ivf", "faiss-pca", "faiss-pq", "hnsw"]

every = pytest.mark.parametrize("backend", BACKENDS)


@every
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_model_reads_through_it_what_it_reads_through_exact(backend, family, library):
    model = build(family)
    memory = read(library, model, length=300)
    options = {"top_k": 20} if family == "bart" else {"budget": 64}
    outputs = []
    for index in ("exact", backend, backend):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with memstore.attach(model, memory, index=index, **options):
                outputs.append(run(model))
        built = [warning for warning in caught if issubclass(warning.category, IndexNotice)]
        assert len(built) == (index == backend and len(outputs) == 2)
    exact, first, second = outputs
    torch.testing.assert_close(first, exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(first, second)  # built, and loaded


@pytest.mark.parametrize("backend", ["faiss-ivf", "hnsw"])
def test_a_full_disk_costs_the_file_alone(backend, library, monkeypatch):
    memory = read(library, build("bart"), length=300)
    with memory.open() as opened, pytest.warns(IndexNotice, match="It is kept"):
        before = open_index(opened, backend).indexes["hidden"]
    assert isinstance(before, SavedIndex)
    real = type(before).save
    monkeypatch.setattr(type(before), "save", lambda self, path: real(self, type(path)("/dev/full")))
    with pytest.raises(StoreFullError, match="full. Free some space"):
        library.reindex(memory.name, backend)
    monkeypatch.undo()
    with memory.open() as opened:
        loaded = open_index(opened, backend).indexes["hidden"]
    queries = torch.randn(3, before.width)
    assert torch.equal(loaded.search(queries, 9)[1], before.search(queries, 9)[1])


@pytest.mark.filterwarnings("ignore::memstore.errors.IndexNotice")
@pytest.mark.parametrize("backend", ["exact", *BACKENDS])
def test_memories_of_several_dtypes_are_read_together(backend, library):
    model = build("bart")
    memories = [read(library, model, dtype, length=200, dtype=dtype) for dtype in ("float16", "float32", "bfloat16")]
    with memstore.attach(model, *memories, top_k="all"):
        everything = run(model)
    with memstore.attach(model, *memories, top_k=599, index=backend, explain=True) as attached:
        torch.testing.assert_close(run(model), everything, rtol=1e-2, atol=1e-2)
        assert {reading.document for reading in attached.provenance()} == {"float16", "float32", "bfloat16"}
