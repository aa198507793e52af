"""Checking and tuning: what is reported is what float64 finds, and what is stored is the cheapest that suffices."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import memstore
from memstore import checking
from memstore.errors import (
    CheckError,
    FingerprintMismatchError,
    IndexNotice,
    MemoryNotFoundError,
    PluginError,
    ReadOnlyStoreError,
)
from memstore.indexes import open_index
from memstore.query_sample import query_sample
from memstore.registry import adapter_for
from tests import kept
from tests.models import build, read

K = 10
FAMILIES = ["bart", "llama"]


@pytest.fixture(autouse=True)
def backend(tmp_path, monkeypatch):
    kept.install(tmp_path / "plugins", monkeypatch)


@pytest.fixture(params=FAMILIES)
def case(request, library):
    """A model and its memory, of which the index ``kept`` is built."""
    model = build(request.param)
    memory = read(library, model, length=300)
    library.reindex("doc", "kept")
    return model, memory


def in_float64(model, memory, step):
    """{layer: (recall, mass, exact mass)} of a search among one key in ``step``, head by head."""
    with memory.open() as opened:
        sample = query_sample(opened, adapter_for(model)(model))
        numbers = {}
        for layer, queries in sample.items():
            rows = []
            for head in range(queries.shape[1]):
                if memory.kind == "hidden":
                    keys = torch.cat(opened.blocks("hidden"))
                else:  # six heads, two key-value heads
                    keys = torch.cat(opened.blocks(f"keys.{layer}"))[:, head // 3]
                scores = queries[:, head].double().numpy() @ keys.double().numpy().T
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                for score, weight in zip(scores, weights, strict=True):
                    best = np.argsort(-score)[:K]
                    found = np.argsort(-score[::step])[:K] * step
                    hits = (score[found] >= score[best].min() - 1e-5).sum()
                    rows.append((hits / K, weight[found].sum(), weight[best].sum()))
            numbers[layer] = tuple(np.mean(rows, axis=0))
    return numbers


def kept_of(numbers):
    _, mass, exact_mass = np.mean(list(numbers.values()), axis=0)
    return mass / exact_mass


@pytest.mark.parametrize("step", [1, 2])
def test_every_layer_and_the_total_are_what_float64_finds(library, case, monkeypatch, step):
    model, memory = case
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__STEP", str(step))
    report = library.check("doc", model, k=K)
    expected = in_float64(model, memory, step)
    assert (report.name, report.kind, report.num_tokens, report.k) == ("doc", memory.kind, 300, K)
    assert (report.backend, report.options["step"], report.tuning) == ("kept", step, None)
    assert [layer.layer for layer in report.layers] == list(expected) == [0, 1, 2]
    for layer in report.layers:
        measured = (layer.recall, layer.mass, layer.exact_mass)
        assert measured == pytest.approx(expected[layer.layer], rel=1e-3)
    total = report.total
    assert (total.recall, total.mass, total.exact_mass) == pytest.approx(np.mean(list(expected.values()), 0), rel=1e-3)
    assert total.kept == pytest.approx(kept_of(expected), rel=1e-3)
    assert total.num_queries == sum(layer.num_queries for layer in report.layers)
    assert total.num_queries == sum(len(queries.flatten(0, 1)) for queries in sample_of(model, memory).values())
    if step == 1:
        assert (total.recall, total.kept) == (1, pytest.approx(1)) and total.error < 1e-4
    else:
        assert total.recall < 0.7 and total.kept < 0.95 and total.error > 0.1
    assert json.loads(report.model_dump_json())["total"]["kept"] == total.kept


def sample_of(model, memory):
    with memory.open() as opened:
        return query_sample(opened, adapter_for(model)(model))


def steps(memory):
    """What the indexes are searched with when they are opened the next time."""
    with memory.open() as opened:
        return {index.options.model_dump()["step"] for index in open_index(opened, "kept").indexes.values()}


def test_tuning_finds_the_cheapest_value_and_stores_it(library, case):
    model, memory = case
    reached = {step: kept_of(in_float64(model, memory, step)) for step in (4, 2)}
    assert reached[4] < reached[2] < 0.95
    target = (reached[4] + reached[2]) / 2
    report = library.check("doc", model, backend="kept", k=K, tune=True, target_mass=target)
    tuning = report.tuning
    assert (tuning.reached, tuning.target_mass, tuning.options) == (True, target, {"step": 2})
    assert [trial.options["step"] for trial in tuning.trials] == [4, 2]
    assert [trial.total.kept for trial in tuning.trials] == pytest.approx([reached[4], reached[2]], rel=1e-3)
    assert report.options["step"] == 2 and report.total == tuning.trials[1].total
    record = library.indexes("doc")[0]
    assert record.tuned == {"step": 2}
    assert (record.quality["reached"], record.quality["target_mass"], record.quality["k"]) == (True, target, K)
    assert record.quality["kept"] == report.total.kept
    assert steps(memory) == {2}


@pytest.mark.parametrize("target", [None, 1.0])
def test_what_loses_nothing_reaches_every_target(library, case, target, monkeypatch):
    monkeypatch.setenv("MEMSTORE__INDEX__AUTO__TARGET_MASS", "0.997")
    model, _ = case
    report = library.check("doc", model, backend="kept", k=K, tune=True, target_mass=target)
    assert (report.tuning.reached, report.tuning.options) == (True, {"step": 1})
    assert report.tuning.target_mass == (0.997 if target is None else target)


def test_the_best_is_stored_where_nothing_reaches_the_target(library, case, monkeypatch):
    model, memory = case
    monkeypatch.setattr(kept.KeptIndex, "tunable", {"step": (4, 2, 3)})
    report = library.check("doc", model, backend="kept", k=K, tune=True)
    assert (report.tuning.reached, report.tuning.options) == (False, {"step": 2})
    assert [trial.options["step"] for trial in report.tuning.trials] == [4, 2, 3]
    assert report.total.kept == pytest.approx(kept_of(in_float64(model, memory, 2)), rel=1e-3)
    record = library.indexes("doc")[0]
    assert record.tuned == {"step": 2} and record.quality["reached"] is False


def test_several_options_are_tried_cheapest_first(library, monkeypatch):
    model = build("bart")
    read(library, model, length=300)
    tunable = {"step": (4, 2), "effort": (1, 2)}
    monkeypatch.setattr(kept.KeptIndex, "tunable", tunable)
    monkeypatch.setitem(kept.KeptOptions.model_fields, "effort", kept.KeptOptions.model_fields["step"])
    with pytest.warns(IndexNotice):
        report = library.check("doc", model, backend="kept", k=K, tune=True)
    tried = [(trial.options["step"], trial.options["effort"]) for trial in report.tuning.trials]
    assert tried == [(4, 1), (4, 2), (2, 1), (2, 2)]
    assert report.tuning.options == {"step": 2, "effort": 1}  # which is as good as the dearer one


def test_a_backend_without_such_options_has_nothing_to_tune(library, case):
    model, _ = case
    report = library.check("doc", model, backend="exact", k=K, tune=True)
    assert (report.tuning.reached, report.tuning.options) == (True, {})
    assert "The backend 'exact' has nothing to tune." in report.notes
    assert [record.backend for record in library.indexes("doc")] == ["kept"]


def test_the_quality_of_a_kept_index_without_such_options_is_stored_too(library, case, monkeypatch):
    model, _ = case
    monkeypatch.setattr(kept.KeptIndex, "tunable", {})
    report = library.check("doc", model, backend="kept", k=K, tune=True)
    record = library.indexes("doc")[0]
    assert (record.tuned, record.quality["kept"]) == ({}, report.total.kept)


def test_what_auto_chooses_is_checked_and_what_was_tuned_is_chosen(library, case, monkeypatch):
    model, _ = case
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "auto")
    assert library.check("doc", model, k=K).backend == "exact"
    monkeypatch.setenv("MEMSTORE__INDEX__AUTO__EXACT_TOKENS", "100")
    times = {"kept": 1.0, "exact": 2.0}  # as such a backend takes for a large memory

    def reading_us(questions, indexes, k):
        return times["kept" if type(next(iter(indexes.values()))).__name__ == "KeptIndex" else "exact"]

    monkeypatch.setattr(checking, "_reading_us", reading_us)
    library.check("doc", model, backend="kept", k=K, tune=True)
    assert library.check("doc", model, k=K).backend == "kept"
    times["kept"] = 3.0
    library.check("doc", model, backend="kept", k=K, tune=True)
    assert library.check("doc", model, k=K).backend == "exact"


def test_the_time_of_reading_is_measured_beside_that_of_the_small_backend(library, case):
    model, memory = case
    library.check("doc", model, backend="kept", k=K, tune=True)
    (record,) = library.indexes(memory.name)
    assert record.quality["reading_us"] > 0 and record.quality["small_reading_us"] > 0


def test_what_is_configured_goes_before_what_was_tuned_and_that_is_said(library, case, monkeypatch):
    model, memory = case
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__STEP", "4")
    report = library.check("doc", model, k=K, tune=True)
    assert report.tuning.options == {"step": 1}
    assert any("step = 4 is configured" in note and "before the 1 that was tuned" in note for note in report.notes)
    assert steps(memory) == {4}


def test_k_is_what_reading_asks_for_and_never_more_than_there_are(library, monkeypatch):
    bart, llama = build("bart"), build("llama")
    for name, length, k in (("long", 300, 64), ("short", 7, 7)):
        read(library, bart, name, length)
        report = library.check(name, bart)
        assert report.k == k
        assert (report.total.mass > 0.999) == (k == length)
        assert any("takes in every token" in note for note in report.notes) == (k == length)
    read(library, llama, "chat", 150)
    assert library.check("chat", llama, k=5000).k == library.check("chat", llama).k == 150
    monkeypatch.setattr(checking, "BLOCK_SEARCH", 100)
    assert library.check("chat", llama).k == 100


def test_a_k_too_small_for_the_memory_is_said_to_be(library, case):
    model, _ = case
    few, many = library.check("doc", model, k=2), library.check("doc", model, k=290)
    assert few.total.exact_mass < 0.5 < many.total.exact_mass
    assert any("k is too small for this memory" in note for note in few.notes)
    assert not many.notes


def test_half_precision_is_held_against_exact_numbers(library):
    """What ``exact`` loses by searching in bfloat16 shows: the truth is computed in float32."""
    model = build("bart").to(torch.bfloat16)
    read(library, model, length=300)
    total = library.check("doc", model, backend="exact", k=K).total
    assert 0.9 < total.recall <= 1 and 0.99 < total.kept <= 1


def test_a_store_that_is_only_read_is_checked_but_not_tuned(library, case):
    model, _ = case
    expected = library.check("doc", model, backend="kept", k=K)
    path = library.path
    library.close()
    with memstore.open(path, "r") as store:
        again = store.check("doc", model, backend="kept", k=K)
        assert again.total.kept == expected.total.kept
        with pytest.raises(ReadOnlyStoreError, match='mode="r"'):
            store.check("doc", model, backend="kept", k=K, tune=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"k": True},
        {"k": 2.0},
        {"target_mass": 0.9},
        {"target_mass": 0.0, "tune": True},
        {"target_mass": 1.01, "tune": True},
        {"target_mass": float("nan"), "tune": True},
    ],
    ids=str,
)
def test_wrong_numbers_are_refused(library, wrong):
    with pytest.raises(CheckError, match=next(iter(wrong))):
        library.check("doc", None, **wrong)


def test_another_model_another_name_another_backend(library, case):
    model, memory = case
    with pytest.raises(MemoryNotFoundError, match="'other'"):
        library.check("other", model)
    with pytest.raises(PluginError, match="no-such"):
        library.check("doc", model, backend="no-such")
    with pytest.raises(FingerprintMismatchError, match="weights"):
        library.check("doc", build("bart" if memory.kind == "hidden" else "llama", seed=1))
