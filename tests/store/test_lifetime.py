"""Stores and memories that are open here and there: removal, closing, forks and other processes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from memstore.errors import (
    MemoryNotFoundError,
    ReadOnlyStoreError,
    StoreError,
    StoreInUseError,
)
from memstore.store import MemoryStore
from tests.store import making


def test_a_removed_memory_gives_its_space_back_and_its_readers_keep_reading(library: MemoryStore) -> None:
    memory = making.write(library)
    with memory.open() as opened:
        view = opened.block("large", 0)
        del library["esther"]
        assert list((library.path / "memories").iterdir()) == []
        np.testing.assert_array_equal(opened.rows("large", 0, 300), making.rows("large", 0, 300))
    np.testing.assert_array_equal(view, making.rows("large", 0, 64))
    with pytest.raises(MemoryNotFoundError, match="removed"):
        memory.open()
    with pytest.raises(MemoryNotFoundError):
        del library["esther"]
    making.check(making.write(library))


def test_a_store_cannot_be_closed_while_a_memory_is_open(library: MemoryStore) -> None:
    opened = making.write(library).open()
    with pytest.raises(StoreInUseError, match="open"):
        library.close()
    making.check(library["esther"])
    opened.close()
    library.close()
    library.close()
    with pytest.raises(StoreError, match="closed"):
        library.names()


def test_an_error_inside_a_store_is_not_hidden_by_an_open_memory(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), memstore.open(tmp_path / "a") as library:
        opened = making.write(library).open()
        raise ZeroDivisionError
    opened.close()
    with pytest.raises(StoreInUseError), memstore.open(tmp_path / "b") as library:
        opened = making.write(library).open()


def test_tensors_outlive_everything(tmp_path: Path) -> None:
    with memstore.open(tmp_path / "library") as library:
        with making.write(library).open() as opened:
            tensor = opened.block("large", 2)
        with pytest.raises(StoreError, match="no longer open"):
            opened.block("large", 2)
        del library["esther"]
    del opened, library
    gc.collect()
    assert torch.equal(tensor, torch.from_numpy(making.rows("large", 128, 192)))


def test_one_store_may_be_opened_many_times_in_a_process(library: MemoryStore) -> None:
    with memstore.open(library.path, "r") as reading, memstore.open(library.path) as writing:
        making.write(writing, "ruth")
        assert reading.names() == library.names() == ["ruth"]
    assert library.names() == ["ruth"]


def test_a_reading_store_lets_another_write_in_the_same_process(tmp_path: Path) -> None:
    memstore.open(tmp_path / "library").close()
    with memstore.open(tmp_path / "library", "r") as reading:
        with memstore.open(tmp_path / "library") as writing:
            making.write(writing)
        making.check(reading["esther"])
        with pytest.raises(ReadOnlyStoreError):
            reading.create(making.manifest("ruth"), making.document())
        with pytest.raises(ReadOnlyStoreError):
            del reading["esther"]


def test_a_forked_child_reads_and_writes(library: MemoryStore) -> None:
    opened = making.write(library).open()
    child = os.fork()
    if child == 0:
        try:
            making.check(library["esther"])
            np.testing.assert_array_equal(opened.rows("large", 0, 300), making.rows("large", 0, 300))
            making.write(library, "ruth")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    opened.close()
    assert library.names() == ["esther", "ruth"]
    making.check(library["ruth"])


def test_another_process_sees_new_memories_at_once(library: MemoryStore) -> None:
    code = """
import sys
import memstore
with memstore.open(sys.argv[1], "r") as library:
    for line in sys.stdin:
        print(library.names(), flush=True)
"""
    process = making.child(code, library.path, stdin=-1)
    assert process.stdin is not None
    assert process.stdout is not None
    for name in ("a", "b", "c"):
        making.write(library, name)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{library.names()}\n"
    process.communicate()
