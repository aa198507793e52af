"""Choosing a backend: by size, device, and what was measured of the indexes that are kept."""

from __future__ import annotations

import shutil
import warnings

import pytest

import memstore
from memstore import config
from memstore.auto import choose
from memstore.errors import ConfigError, IndexNotice, PluginError
from memstore.indexes import check_backend, open_index, remember
from tests import kept
from tests.models import build, read, run

TOKENS = 300


@pytest.fixture
def memory(library, tmp_path, monkeypatch):
    kept.install(tmp_path / "plugins", monkeypatch)
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "auto")
    return read(library, build("bart"), length=TOKENS)


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setenv("MEMSTORE__INDEX__AUTO__EXACT_TOKENS", str(TOKENS - 1))


def chosen(memory, device="cpu", backend=None):
    return choose(config.load(), backend, memory.manifest, memory.store.indexes(memory.name), device)


def measure(memory, share, time=1.0, small=9.0, backend="kept"):
    with warnings.catch_warnings(), memory.open() as opened:
        warnings.simplefilter("ignore", IndexNotice)  # it may have to be built first
        index = open_index(opened, backend)
    remember(memory, index, {"step": 2}, {"kept": share, "reading_us": time, "small_reading_us": small})


def test_a_small_memory_is_searched_exactly(memory):
    memory.store.reindex(memory.name, "kept")
    measure(memory, 1.0)
    assert chosen(memory) == ("exact", "300 tokens are not more than 200,000")


def test_nothing_that_was_not_measured_is_chosen(memory, large):
    assert chosen(memory).backend == "exact" and "--tune" in chosen(memory).reason
    memory.store.reindex(memory.name, "kept")
    assert chosen(memory).backend == "exact" and "was measured to be faster and keep 99.0%" in chosen(memory).reason


@pytest.mark.parametrize(
    ("share", "target", "backend"), [(0.98, None, "exact"), (0.99, None, "kept"), (0.9, "0.9", "kept")]
)
def test_an_index_that_reaches_the_target_is_chosen(memory, large, monkeypatch, share, target, backend):
    if target is not None:
        monkeypatch.setenv("MEMSTORE__INDEX__AUTO__TARGET_MASS", target)
    memory.store.reindex(memory.name, "kept")
    measure(memory, share)
    assert chosen(memory).backend == backend


def test_the_fastest_of_those_is_chosen(memory, large, tmp_path, monkeypatch):
    kept.install(tmp_path / "more", monkeypatch, "more")
    measure(memory, 0.999, time=3.0)
    measure(memory, 0.991, time=2.0, backend="more")
    assert chosen(memory).backend == "more" and "fastest" in chosen(memory).reason


def test_what_can_no_longer_be_loaded_is_not_chosen(memory, large, tmp_path):
    memory.store.reindex(memory.name, "kept")
    measure(memory, 1.0)
    shutil.rmtree(tmp_path / "plugins" / "kept-1.0.dist-info")
    assert chosen(memory).backend == "exact" and "kept would keep 99.0%" in chosen(memory).reason
    with memory.open() as opened:
        assert open_index(opened).backend == "exact"


def test_an_index_that_takes_longer_than_exact_search_is_not_chosen(memory, large):
    measure(memory, 1.0, time=9.1)
    assert chosen(memory).backend == "exact" and "faster" in chosen(memory).reason
    measure(memory, 1.0, time=8.9)
    assert chosen(memory).backend == "kept"


def test_a_gpu_scores_every_key(memory, large):
    measure(memory, 1.0)
    assert chosen(memory, "cuda:0") == ("exact", "on cuda:0 every key is scored at once")


def test_what_is_named_is_what_is_used(memory, large, monkeypatch):
    assert chosen(memory, backend="kept") == ("kept", "it was asked for")
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    assert chosen(memory) == ("kept", "it is configured")
    assert chosen(memory, backend="auto").backend == "exact"


def test_a_model_reads_through_the_choice(memory, large):
    model = build("bart")
    with memory.open() as opened:
        assert open_index(opened).backend == "exact"
    memory.store.reindex(memory.name, "kept")
    measure(memory, 1.0)
    kept.loaded.clear()
    with memstore.attach(model, memory, top_k=5):
        run(model)
    assert kept.loaded == [TOKENS]


def test_reindexing_builds_what_would_be_chosen(memory, large):
    assert memory.store.reindex(memory.name) == ("exact", None)
    with pytest.warns(IndexNotice), memory.open() as opened:
        open_index(opened, "kept")
    measure(memory, 1.0)
    assert memory.store.reindex(memory.name)[0] == "kept"


def test_a_wrong_choice_is_told_when_attaching(memory, monkeypatch):
    check_backend(None)
    monkeypatch.setenv("MEMSTORE__INDEX__AUTO__SMALL", "exakt")
    with pytest.raises(PluginError, match="Did you mean 'exact'"):
        memstore.attach(build("bart"), memory)


def test_a_choice_has_no_options(memory, monkeypatch):
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__STEP", "2")
    with pytest.raises(ConfigError, match='STEP: index.options.*"auto" has no options'):
        config.load()
