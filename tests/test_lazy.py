"""Attaching reads nothing of a memory on a CPU: the first step that reads it verifies it, and so does indexing."""

from __future__ import annotations

import pytest
import torch

import memstore
from memstore import open_memory, values
from memstore.errors import DamagedMemoryError, IndexNotice
from tests.models import build, read, run, tokens


@pytest.fixture
def model():
    return build("bart")


@pytest.fixture
def touched(monkeypatch):
    """The sizes of the values whose checksums are computed."""
    sizes = []
    real = values.checksum

    def noting(value):
        sizes.append(len(value))
        return real(value)

    monkeypatch.setattr(open_memory, "checksum", noting)
    monkeypatch.setattr(open_memory, "_checked", {})
    return sizes


def damaged(library, model, monkeypatch):
    """A memory of which a byte is another on disk, and this process has verified nothing."""
    memory = read(library, model, length=300)
    damage(library, memory, monkeypatch)
    return memory


def damage(library, memory, monkeypatch):
    data = library.path / "memories" / memory.manifest.id / "data.mdb"
    whole = bytearray(data.read_bytes())
    with memory.open("off") as opened:
        at = whole.find(opened.block("hidden", 0).numpy().tobytes())
    whole[at + 100] ^= 1
    data.write_bytes(whole)
    monkeypatch.setattr(open_memory, "_checked", {})


@pytest.mark.parametrize("top_k", ["all", 5])
def test_attaching_reads_nothing_and_the_first_step_everything(library, model, touched, top_k):
    memory = read(library, model, length=300)
    nbytes = memory.manifest.vector_bytes
    touched.clear()
    with memstore.attach(model, memory, top_k=top_k):
        assert touched == []
        first = run(model)
        assert sum(touched) == nbytes
        assert torch.equal(run(model), first)
        assert sum(touched) == nbytes  # once for the process
    with memstore.attach(model, memory, top_k=top_k):
        run(model)
    assert sum(touched) == nbytes


def test_every_step_refuses_a_damaged_memory(library, model, monkeypatch):
    memory = damaged(library, model, monkeypatch)
    before = run(model)
    with memstore.attach(model, memory, top_k="all"):
        for _ in range(2):
            with pytest.raises(DamagedMemoryError, match="read its document again"):
                run(model)
    assert torch.equal(run(model), before)


def test_a_damaged_memory_is_refused_where_the_decoder_is_called_by_itself(library, model, monkeypatch):
    memory = damaged(library, model, monkeypatch)
    states = model.get_encoder()(tokens(5)[None]).last_hidden_state
    with (
        memstore.attach(model, memory, top_k="all"),
        pytest.raises(DamagedMemoryError, match="read its document again"),
    ):
        model.get_decoder()(tokens(3)[None], encoder_hidden_states=states)


@pytest.mark.parametrize(
    "options",
    [{"top_k": "all"}, {"top_k": 5}, {"top_k": 5, "index": "faiss-flat"}],
    ids=["all", "exact", "kept"],
)
def test_a_damaged_memory_that_is_added_is_refused(library, model, monkeypatch, options):
    """Also one whose index was kept before it was damaged: its states are read all the same."""
    first = read(library, model, "first", length=300)
    kept = read(library, model, length=300)
    if "index" in options:
        for memory in (first, kept):
            library.reindex(memory.name, backend=options["index"])
    damage(library, kept, monkeypatch)
    with memstore.attach(model, first, **options) as attached:
        expected = run(model)
        attached.add(kept)
        with pytest.raises(DamagedMemoryError, match="read its document again"):
            run(model)
        attached.remove(kept)
        assert torch.equal(run(model), expected)


def test_no_index_is_built_of_a_damaged_memory(library, model, monkeypatch):
    memory = damaged(library, model, monkeypatch)
    attachment = memstore.attach(model, memory, top_k=5, index="faiss-flat")
    with pytest.raises(DamagedMemoryError, match="read its document again"), attachment:
        pass
    assert library.indexes(memory.name) == []


def test_an_index_that_is_kept_is_opened_without_reading_the_memory(library, model, touched):
    memory = read(library, model, length=300)
    with pytest.warns(IndexNotice, match="It is kept"), memstore.attach(model, memory, top_k=5, index="faiss-flat"):
        expected = run(model)
    open_memory._checked.clear()
    touched.clear()
    with memstore.attach(model, memory, top_k=5, index="faiss-flat"):
        assert touched == []
        assert torch.equal(run(model), expected)
