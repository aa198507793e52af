"""Stores in the memory of this process: they do what those on disk do, and are gone when the last is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from memstore.errors import (
    IndexNotice,
    MemoryBusyError,
    MemoryExistsError,
    MemoryNotFoundError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreNotFoundError,
)
from memstore.store import MemoryStore
from memstore_backends.in_memory import InMemoryRecords
from tests import kept
from tests.models import build, read, run
from tests.store import making


@pytest.fixture
def volatile(tmp_path: Path) -> Iterator[MemoryStore]:
    with memstore.open(tmp_path / "volatile", records="in-memory") as store:
        yield store
    assert not (tmp_path / "volatile").exists()


def test_memories_are_kept_found_and_removed(volatile: MemoryStore) -> None:
    making.check(making.write(volatile), "open")
    making.write(volatile, "ruth")
    assert volatile.names() == ["esther", "ruth"]
    assert [(result.name, result.ok) for result in volatile.verify()] == [("esther", True), ("ruth", True)]
    vectors = making.TOKENS * (40 * 4 + 6 * 2)
    assert vectors < volatile["esther"].nbytes < 1.2 * vectors
    with volatile["esther"].open() as opened:
        del volatile["esther"]
        tensor = opened.block("large", 1)
    np.testing.assert_array_equal(tensor, making.rows("large", 64, 128))
    assert volatile.names() == ["ruth"]
    with pytest.raises(MemoryNotFoundError):
        volatile["esther"]
    making.check(making.write(volatile))


def test_what_was_begun_is_resumed_and_ends_as_on_disk(volatile: MemoryStore, library: MemoryStore) -> None:
    with volatile.create(making.manifest(), making.document()) as writer:
        making.append(writer)
        with pytest.raises(MemoryBusyError), memstore.open(volatile.path, records="in-memory") as another:
            another.create(making.manifest(), making.document())
    assert len(volatile) == 0
    with volatile.create(making.manifest(), making.document()) as writer:
        assert writer.num_done == making.BLOCK
        memory = making.fill(writer)
    assert memory.manifest.digest == making.write(library).manifest.digest
    with pytest.raises(MemoryExistsError):
        volatile.create(making.manifest(), making.document())


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_model_reads_from_it_what_it_reads_from_disk(
    volatile: MemoryStore, library: MemoryStore, family: str
) -> None:
    model = build(family)
    outputs, options = [], {"top_k": 8} if family == "bart" else {}
    for store in (volatile, library):
        with memstore.attach(model, read(store, model), **options):
            outputs.append(run(model))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], run(model))
    assert volatile["doc"].manifest.digest == library["doc"].manifest.digest


def test_stores_of_one_path_share_it_until_the_last_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "volatile"
    with pytest.raises(StoreNotFoundError, match="no store open in memory"):
        memstore.open(path, "r", records="in-memory")
    with memstore.open(path, records="in-memory") as one:
        making.write(one)
        with memstore.open(path, "r", records="in-memory") as two:
            making.check(two["esther"])
            with pytest.raises(ReadOnlyStoreError):
                del two["esther"]
        with memstore.open(tmp_path / "other", records="in-memory") as other:
            assert other.names() == []
        two = memstore.open(path, records="in-memory")
    with memstore.open(path, "r", records="in-memory") as three:
        making.check(three["esther"])
    two.close()
    two.close()
    with pytest.raises(StoreNotFoundError):
        memstore.open(path, "r", records="in-memory")
    with memstore.open(path, records="in-memory") as again:
        assert again.names() == []
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_forgotten_is_a_store_that_is_closed(tmp_path: Path) -> None:
    making.write(memstore.open(tmp_path, records="in-memory"))
    with pytest.raises(StoreNotFoundError):
        memstore.open(tmp_path, "r", records="in-memory")


def test_tensors_outlive_the_store(tmp_path: Path) -> None:
    with memstore.open(tmp_path, records="in-memory") as store:
        with making.write(store).open() as opened, pytest.raises(StoreInUseError):
            store.close()
        with store["esther"].open() as opened:
            tensor = opened.block("large", 2)
    del store, opened
    np.testing.assert_array_equal(tensor, making.rows("large", 128, 192))


def test_threads_encode_side_by_side(volatile: MemoryStore) -> None:
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(5):
                making.check(making.write(volatile, name), "open")
                del volatile[name]
            making.write(volatile, name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert volatile.names() == ["0", "1", "2", "3"]


def test_where_memory_ends_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = InMemoryRecords(tmp_path, "a")
    writer = records.writer("0" * 32, 1)
    writer.put({b"a": b"1"})
    empty = np.empty

    def small(size: int, dtype: Any) -> Any:
        if size > 1000:
            raise MemoryError
        return empty(size, dtype)

    monkeypatch.setattr(np, "empty", small)
    with pytest.raises(StoreFullError, match="no memory left"):
        writer.put({b"a": b"2", b"b": bytes(1000)})
    assert (list(writer.keys()), writer.get(b"a")) == ([b"a"], b"1")
    writer.close()
    records.close()


def test_indexes_are_built_for_the_process_and_not_kept(
    volatile: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)
    model = build("bart")
    memory = read(volatile, model)
    with pytest.warns(IndexNotice, match="not kept"), memstore.attach(model, memory, top_k=8, index="kept"):
        run(model)
    with pytest.raises(StoreError, match="keeps nothing on disk"):
        volatile.reindex("doc", "kept")
    assert volatile.check("doc", model, backend="exact").total.recall == 1
    assert volatile.indexes("doc") == []
