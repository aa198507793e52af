"""A store at a path with spaces and characters of many scripts does all that another does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memstore
from memstore.indexes import reindex
from tests.models import build, tokens


@pytest.mark.parametrize("folder", ["two words", "Bücher, мысли, 書", 'it\'s "quoted" & $HOME;*?[x]', "a\nb", "-f"])
def test_a_store_may_lie_anywhere(tmp_path: Path, folder: str) -> None:
    path, model = tmp_path / folder / "my store", build("bart")
    path.parent.mkdir()
    with memstore.open(path) as store:
        memory = store.encode(model, input_ids=tokens(300), name=folder)
        with memstore.attach(model, memory) as attached:
            expected = attached.generate(max_new_tokens=4)
        for backend in ("hnsw", "faiss-flat"):
            reindex(memory, backend)
        store.export(path.parent / "exported")
    with memstore.open(path, "r") as store:
        assert [result.ok for result in store.verify()] == [True]
        assert {record.backend for record in store.indexes(folder)} == {"hnsw", "faiss-flat"}
        for index in ("hnsw", "faiss-flat"):  # opened from its file
            with memstore.attach(model, store[folder], top_k=300, index=index) as attached:
                assert torch.equal(attached.generate(max_new_tokens=4), expected)
    with memstore.open(path.parent / "another") as store:
        (imported,) = store.import_from(path.parent / "exported")
        assert imported.manifest.digest == memory.manifest.digest
