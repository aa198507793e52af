"""The example of a third party's plugin: installed beside memstore, found through its entry point, and used."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

import memstore
from memstore import config, registry
from memstore.store import MemoryStore
from tests.models import build, read, run

EXAMPLE = Path(__file__).parents[1] / "examples" / "memstore-numpy-backend"


def test_it_is_found_through_its_entry_point() -> None:
    (found,) = (plugin for plugin in registry.plugins(registry.BACKENDS) if plugin.name == "numpy")
    assert (found.distribution, found.value) == ("memstore-numpy-backend", "memstore_numpy_backend:NumpyIndex")
    assert found.version == distribution("memstore-numpy-backend").version == "0.1.0"
    module = registry.load(registry.BACKENDS, "numpy").__module__
    assert Path(str(__import__(module).__file__)) == EXAMPLE / "memstore_numpy_backend.py"


def test_a_model_reads_with_it_what_it_reads_with_exact_search(library: MemoryStore) -> None:
    model = build("bart")
    memory, answers = read(library, model), {}
    for index in ("exact", "numpy"):
        with memstore.attach(model, memory, top_k=8, index=index):
            answers[index] = run(model)
    torch.testing.assert_close(answers["numpy"], answers["exact"], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(answers["numpy"], run(model), atol=1e-3)


def test_it_is_chosen_and_set_by_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "numpy")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__CHUNK", "7")
    name, plugin, options = config.load().index_plugin()
    assert (name, plugin.__name__, options.model_dump()) == ("numpy", "NumpyIndex", {"chunk": 7})
