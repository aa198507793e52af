"""Indexes as caches of the store: kept, found again, and built anew where they are missing, stale or damaged."""

from __future__ import annotations

import shutil
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import memstore
from memstore.errors import (
    ConfigError,
    IndexBuildError,
    IndexNotice,
    MemoryNotFoundError,
    PluginError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from memstore.index_record import all_records, index_key, write_record
from memstore.indexes import open_index, reindex, remember
from memstore.slots import slots
from tests import kept
from tests.models import build, read

KINDS = {"bart": ["hidden"], "llama": [f"keys.{layer}.{head}" for layer in range(3) for head in range(2)]}


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)


@pytest.fixture(params=KINDS)
def memory(request, library):
    return read(library, build(request.param), length=300)


@pytest.fixture
def hidden(library):
    return read(library, build("bart"), length=300)


def names(memory):
    return [slot.name for slot in slots(memory.manifest)]


def folder(memory):
    return memory.store.records.folder(memory.manifest.id) / "indexes"


def files(memory):
    return sorted(path for path in folder(memory).rglob("*") if path.is_file())


def found(memory):
    """What every index of the memory finds: its scores and ids."""
    with memory.open() as opened:
        index = open_index(opened, "kept")
        return {name: each.search(torch.ones(2, each.width), 5) for name, each in index.indexes.items()}


def tune(memory, tuned, quality):
    with memory.open() as opened:
        remember(memory, open_index(opened, "kept"), tuned, quality)


def expect_built(memory, reason):
    """Opening it gives a notice with this reason, the right results, and an index that is found the next time."""
    kept.built.clear()
    with pytest.warns(IndexNotice, match=reason):
        first = found(memory)
    assert len(kept.built) == len(names(memory))
    kept.built.clear()
    again = found(memory)
    assert kept.built == []
    with memory.open() as opened:
        exact = open_index(opened, "exact").indexes
        scale = memory.store.indexes(memory.name)[0].options["scale"]
        for name, (scores, ids) in first.items():
            assert torch.equal(ids, again[name][1]) and torch.equal(scores, again[name][0])
            truth = exact[name].search(torch.ones(2, exact[name].width), 5)[0]  # tokens that repeat have equal keys
            torch.testing.assert_close(scores, truth * scale, rtol=1e-5, atol=1e-5)


def test_one_index_for_each_slot(memory):
    family = "bart" if memory.kind == "hidden" else "llama"
    assert names(memory) == KINDS[family]
    with memory.open() as opened:
        for slot in slots(memory.manifest):
            keys, values = torch.cat(slot.keys(opened)), torch.cat(slot.values(opened))
            assert keys.shape == values.shape == (300, 48 if memory.kind == "hidden" else 8)
            assert torch.equal(keys, values) == (memory.kind == "hidden")
            if slot.layer is not None:
                assert torch.equal(values, torch.cat(opened.blocks(f"values.{slot.layer}"))[:, slot.head])


def test_an_index_is_built_once_and_then_loaded(memory):
    expect_built(memory, "none was kept.*kept for the next time")
    (record,) = memory.store.indexes(memory.name)
    assert (record.backend, record.distribution, record.version) == ("kept", "kept", "1.0")
    assert record.options == {"scale": 1.0}
    assert set(record.files) == set(names(memory))
    assert record.nbytes == sum(path.stat().st_size for path in files(memory))


def test_reindex_builds_ahead_and_replaces(memory, recwarn):
    name, first = memory.store.reindex(memory.name, "kept")
    assert name == "kept" and first is not None and len(kept.built) == len(names(memory))
    _, second = memory.store.reindex(memory.name, "kept", {"scale": "2"})
    assert second.options == {"scale": 2.0}
    assert [path.name for path in folder(memory).iterdir()] == [second.folder]
    kept.built.clear()
    found(memory)
    assert kept.built == [] and not recwarn  # the options it was built with hold, as nothing else is configured


def test_reindex_holds_one_index_at_a_time(memory, monkeypatch):
    alive: weakref.WeakSet[kept.KeptIndex] = weakref.WeakSet()
    build_it, most = kept.KeptIndex.build, []

    def note(self, blocks):
        alive.add(self)
        most.append(len(alive))
        build_it(self, blocks)

    monkeypatch.setattr(kept.KeptIndex, "build", note)
    memory.store.reindex(memory.name, "kept")
    assert most == [1] * len(names(memory))


def test_an_index_that_keeps_nothing_is_only_tried(memory):
    assert memory.store.reindex(memory.name, "exact") == ("exact", None)
    assert memory.store.indexes(memory.name) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: shutil.rmtree(file.parent), "is missing"),
        (lambda file: shutil.rmtree(file.parents[1]), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "is damaged"),
        (lambda file: file.write_bytes(b""), "is damaged"),
        (lambda file: file.write_bytes(bytes([*file.read_bytes()[:-1], file.read_bytes()[-1] ^ 1])), "is damaged"),
    ],
    ids=["file", "folder", "all", "cut", "longer", "empty", "bit"],
)
def test_a_damaged_file_is_never_read(memory, monkeypatch, damage, reason):
    memory.store.reindex(memory.name, "kept")
    damaged = files(memory)[-1]
    damage(damaged)
    load, read_files = kept.KeptIndex.load, []

    def note(self, path):
        read_files.append(path)
        load(self, path)

    monkeypatch.setattr(kept.KeptIndex, "load", note)
    expect_built(memory, reason)
    assert damaged not in read_files
    assert len(files(memory)) == len(names(memory))


def test_what_a_library_cannot_read_is_built_anew(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept")
    load, calls = kept.KeptIndex.load, []

    def fail_first(self, path):
        calls.append(path)
        if len(calls) <= 2:
            raise RuntimeError("version 9")
        load(self, path)

    monkeypatch.setattr(kept.KeptIndex, "load", fail_first)
    expect_built(memory, "cannot be read \\(version 9\\)")


def test_files_of_another_memory_are_not_taken_for_its_own(library, hidden):
    other = read(library, build("bart"), name="other", length=301)
    _, record = library.reindex("other", "kept")
    shutil.copytree(folder(other), folder(hidden))
    write_record(library.records, hidden.manifest, record)
    expect_built(hidden, "other vectors")
    shutil.copytree(folder(other) / record.folder, folder(hidden) / record.folder)
    write_record(library.records, hidden.manifest, record.model_copy(update={"digest": hidden.manifest.digest}))
    expect_built(hidden, "holds 301 keys instead of 300")


def test_other_options_are_another_index(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept", {"scale": 2})
    tune(memory, {"step": 4}, {"mass": 0.5})  # which says nothing of the other
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__SCALE", "0.5")
    expect_built(memory, "built with scale = 2.0, and 0.5 is configured")


@pytest.mark.parametrize("option", [("STEP", "2"), ("DEVICE", "cuda:0")])
def test_options_that_are_not_in_the_file_need_no_building(memory, monkeypatch, recwarn, option):
    memory.store.reindex(memory.name, "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv(f"MEMSTORE__INDEX__OPTIONS__{option[0]}", option[1])
    kept.built.clear()
    with memory.open() as opened:
        index = open_index(opened).indexes[names(memory)[0]]
    assert (kept.built, [str(each.message) for each in recwarn]) == ([], [])
    assert str(getattr(index.options, option[0].lower())) == option[1]


def test_what_was_tuned_is_used_unless_something_else_is_configured(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept")
    tune(memory, {"step": 4}, {"mass": 0.5})
    assert all(id % 4 == 0 for _, ids in found(memory).values() for id in ids.flatten().tolist())
    (record,) = memory.store.indexes(memory.name)
    assert (record.tuned, record.quality) == ({"step": 4}, {"mass": 0.5})
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__STEP", "1")
    assert any(id % 4 for _, ids in found(memory).values() for id in ids.flatten().tolist())
    memory.store.reindex(memory.name, "kept")  # tuned for what is no longer there
    assert memory.store.indexes(memory.name)[0].tuned == {}
    assert memory.store.reindex(memory.name, "kept", {"step": 2})[1].tuned == {"step": 2}


def test_what_was_measured_of_one_index_is_not_kept_with_another(memory):
    memory.store.reindex(memory.name, "kept")
    with memory.open() as opened:
        index = open_index(opened, "kept")
        memory.store.reindex(memory.name, "kept")
        with pytest.raises(StoreBusyError, match="was built anew by another process"):
            remember(memory, index, {"step": 4}, {"mass": 0.5})
    assert memory.store.indexes(memory.name)[0].tuned == {}


def test_a_damaged_index_is_built_again_as_it_was(memory):
    memory.store.reindex(memory.name, "kept", {"scale": 2})
    tune(memory, {"step": 4}, {"mass": 0.5})
    files(memory)[0].unlink()
    with pytest.warns(IndexNotice, match="is missing"):
        assert all(id % 4 == 0 for _, ids in found(memory).values() for id in ids.flatten().tolist())
    (record,) = memory.store.indexes(memory.name)
    assert (record.options, record.tuned, record.quality) == ({"scale": 2.0}, {"step": 4}, {"mass": 0.5})


def test_indexes_of_several_backends_lie_beside_each_other(memory, tmp_path, monkeypatch):
    info = tmp_path / "plugins" / "more-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[memstore.backends]\nmore = tests.kept:KeptIndex\n")
    memory.store.reindex(memory.name, "kept")
    memory.store.reindex(memory.name, "more")
    assert [record.backend for record in memory.store.indexes(memory.name)] == ["kept", "more"]
    assert len(files(memory)) == 2 * len(names(memory))
    kept.built.clear()
    found(memory)
    assert kept.built == []


def test_the_index_goes_with_its_memory(memory):
    memory.store.reindex(memory.name, "kept")
    place, records, id = folder(memory), memory.store.records, memory.manifest.id
    del memory.store[memory.name]
    assert not place.exists()
    assert all_records(records, id) == [] and records.items(b"i") == []


def test_a_memory_removed_while_attached_is_still_searched(hidden):
    with hidden.open() as opened:
        del hidden.store[hidden.name]
        with pytest.warns(IndexNotice, match="not on disk"):
            index = open_index(opened, "kept")
    assert index.indexes["hidden"].search(torch.ones(1, 48), 3)[1].min() >= 0
    assert hidden.store.records.items(b"i") == []


def test_a_memory_removed_while_its_index_is_built(hidden, monkeypatch):
    library = hidden.store
    save = kept.KeptIndex.save

    def remove_meanwhile(self, path):
        save(self, path)
        del library[hidden.name]

    monkeypatch.setattr(kept.KeptIndex, "save", remove_meanwhile)
    with pytest.raises(MemoryNotFoundError, match="removed while its index was built"):
        reindex(hidden, "kept")
    expect_nothing_left(library)


def expect_nothing_left(library):
    assert library.records.items(b"i") == []
    assert library.records.memory_ids() == []
    assert list((library.path / "locks").iterdir()) == []


@pytest.mark.parametrize("attached", [False, True], ids=["reindex", "open"])
def test_a_memory_removed_before_its_index_is_written(hidden, monkeypatch, attached):
    library, build_it = hidden.store, kept.KeptIndex.build

    def remove_meanwhile(self, blocks):
        build_it(self, blocks)
        del library[hidden.name]

    monkeypatch.setattr(kept.KeptIndex, "build", remove_meanwhile)
    if attached:
        with hidden.open() as opened, pytest.warns(IndexNotice, match="could not be kept: Memory .* was removed"):
            assert open_index(opened, "kept").indexes["hidden"].num_keys == 300
    else:
        with pytest.raises(MemoryNotFoundError, match="removed while its index was built"):
            reindex(hidden, "kept")
    expect_nothing_left(library)


def test_a_memory_removed_before_its_index_is_loaded(memory, monkeypatch):
    library, load_it = memory.store, kept.KeptIndex.__init__
    library.reindex(memory.name, "kept")

    def remove_meanwhile(self, options=None):
        load_it(self, options)
        if memory.name in library:
            del library[memory.name]

    monkeypatch.setattr(kept.KeptIndex, "__init__", remove_meanwhile)
    with memory.open() as opened, pytest.warns(IndexNotice, match="is missing"):
        assert open_index(opened, "kept").indexes.keys() == set(names(memory))


def test_a_memory_whose_index_is_being_written_can_be_removed(hidden, monkeypatch):
    """What another process writes into the folder meanwhile makes the first attempt fail."""
    library, rmtree, calls = hidden.store, shutil.rmtree, []

    def filled_again(folder, *args, **kwargs):
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(39, "Directory not empty")
        rmtree(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", filled_again)
    del library[hidden.name]
    assert library.records.folder(hidden.manifest.id) is None and library.records.items(b"t") == []


def test_nothing_of_an_index_stays_when_its_memory_goes(hidden):
    hidden.store.reindex(hidden.name, "kept")
    del hidden.store[hidden.name]
    assert list((hidden.store.path / "locks").iterdir()) == []


def test_a_store_opened_for_reading_builds_and_keeps_nothing(hidden):
    with memstore.open(hidden.store.path, "r") as store:
        with pytest.warns(IndexNotice, match="not kept, because the store was opened read-only"):
            first = found(store[hidden.name])
        assert store.indexes(hidden.name) == []
        with pytest.raises(ReadOnlyStoreError):
            store.reindex(hidden.name, "kept")
    hidden.store.reindex(hidden.name, "kept")
    kept.built.clear()
    with memstore.open(hidden.store.path, "r") as store:
        assert torch.equal(found(store[hidden.name])["hidden"][1], first["hidden"][1])
    assert kept.built == []


def full(self, path):
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_file_and_not_the_search(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept")
    before = [record.model_dump() for record in memory.store.indexes(memory.name)]
    monkeypatch.setattr(kept.KeptIndex, "save", full)
    with pytest.raises(StoreFullError, match="full. Free some space"):
        memory.store.reindex(memory.name, "kept", {"scale": 3})
    assert [record.model_dump() for record in memory.store.indexes(memory.name)] == before
    assert len(files(memory)) == len(names(memory))
    files(memory)[0].unlink()
    with pytest.warns(IndexNotice, match="could not be kept: The disk .* is full"):
        found(memory)


def test_a_disk_too_full_for_a_lock_costs_nothing_but_the_file(hidden, monkeypatch):
    def full(name, wait):
        raise StoreFullError("The disk is full.")

    monkeypatch.setattr(hidden.store.records, "lock", full)
    with pytest.warns(IndexNotice, match="could not be kept: The disk is full"):
        assert found(hidden)["hidden"][1].shape == (2, 5)


@pytest.mark.parametrize("other", [lambda path: path.write_text("no folder"), lambda path: path.symlink_to("nowhere")])
def test_what_stands_in_the_place_of_the_folder_gives_way(hidden, other):
    other(folder(hidden))
    expect_built(hidden, "none was kept.*kept for the next time")


def test_whatever_a_library_fails_with_while_saving_is_told_in_words(hidden, monkeypatch):
    def fail(self, path):
        raise RuntimeError("no such format")

    monkeypatch.setattr(kept.KeptIndex, "save", fail)
    with pytest.raises(StoreError, match="'kept' could not write .*: no such format"):
        hidden.store.reindex(hidden.name, "kept")
    with pytest.warns(IndexNotice, match="could not be kept: .*no such format"):
        found(hidden)


def test_what_a_killed_process_left_goes_with_the_next_index(hidden):
    left = folder(hidden) / ("0" * 32)
    left.mkdir(parents=True)
    (left / "hidden").write_bytes(b"half")
    hidden.store.reindex(hidden.name, "kept")
    assert not left.exists()


def test_a_record_that_cannot_be_read_is_no_index(hidden):
    hidden.store.reindex(hidden.name, "kept")
    hidden.store.records.commit({index_key(hidden.manifest.id, "kept"): b"\xc1"})
    assert hidden.store.indexes(hidden.name) == []
    expect_built(hidden, "none was kept")


def test_a_damaged_record_of_an_index_harms_nothing_else(hidden):
    """The catalog tells the damage of any record; an index can be built again, so its own stops nobody."""
    library = hidden.store
    library.reindex(hidden.name, "kept")

    def damage(backend):
        with library.records._catalog._transaction(write=True) as transaction:
            transaction.put(index_key(hidden.manifest.id, backend), b"no checksum of it")

    damage("kept")
    with memstore.attach(build("bart"), hidden, top_k=5, index="exact"):
        pass
    assert library.indexes(hidden.name) == []
    expect_built(hidden, "none was kept")
    damage("other")
    library.reindex(hidden.name, "kept")
    kept.built.clear()
    assert found(hidden)["hidden"][1].min() >= 0 and kept.built == []
    del library[hidden.name]
    assert library.records.folder(hidden.manifest.id) is None and library.records.items(b"t") == []


def test_files_of_another_distribution_are_not_read(hidden):
    hidden.store.reindex(hidden.name, "kept")
    (record,) = hidden.store.indexes(hidden.name)
    write_record(hidden.store.records, hidden.manifest, record.model_copy(update={"distribution": "other"}))
    expect_built(hidden, "built by other, and kept is installed")


def test_two_that_need_an_index_build_it_once(hidden, monkeypatch):
    ready, count = threading.Barrier(2), []
    build_it = kept.KeptIndex.build

    def slow(self, blocks):
        count.append(1)
        build_it(self, blocks)

    monkeypatch.setattr(kept.KeptIndex, "build", slow)

    def use():
        warnings.simplefilter("ignore", IndexNotice)
        ready.wait()
        with hidden.open() as opened:
            open_index(opened, "kept")

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1


def test_wrong_backends_and_options_are_refused_before_anything_is_built(hidden):
    with pytest.raises(PluginError, match="Did you mean 'kept'"):
        hidden.store.reindex(hidden.name, "kepp")
    with pytest.raises(PluginError, match="no VectorIndex"):
        hidden.store.reindex(hidden.name, "lmdb")
    with pytest.raises(ConfigError, match="nprobe"):
        hidden.store.reindex(hidden.name, "kept", {"nprobe": 3})
    with pytest.raises(ConfigError, match="step"):
        hidden.store.reindex(hidden.name, "kept", {"step": "many"})
    with pytest.raises(PluginError, match="named 5"):
        hidden.store.reindex(hidden.name, 5)
    with pytest.raises(MemoryNotFoundError):
        hidden.store.reindex("nobody", "kept")
    assert hidden.store.indexes(hidden.name) == [] and kept.built == []


def test_an_option_that_cannot_be_kept_is_told(hidden):
    with pytest.raises(IndexBuildError, match="options of 'kept' cannot be kept"):
        hidden.store.reindex(hidden.name, "kept", {"step": 2**64})
    assert hidden.store.indexes(hidden.name) == [] and files(hidden) == []


def test_every_kind_of_model_reads_through_it(memory, recwarn):
    model = build("bart" if memory.kind == "hidden" else "llama")
    memory.store.reindex(memory.name, "kept")
    kept.loaded.clear()
    options = {"top_k": 5} if memory.kind == "hidden" else {"budget": 64}
    ids = torch.arange(5, 13)[None]
    outputs = []
    for backend in ("exact", "kept"):
        with memstore.attach(model, memory, index=backend, **options) as attached:
            outputs.append(attached.generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    assert kept.loaded == [300] * len(names(memory))
    assert torch.equal(*outputs)
