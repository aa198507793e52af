"""Writing a memory: two at once, interruptions, and a full disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memstore
from memstore.catalog import PENDING, key
from memstore.errors import (
    DocumentError,
    MemoryBusyError,
    MemoryExistsError,
    MemoryNotFoundError,
    StoreError,
    StoreFullError,
    StoreInUseError,
)
from memstore.memory_writer import MemoryWriter
from memstore.store import MemoryStore
from tests.store import making

WRITE = """
import sys, time
import memstore
from tests.store import making
with memstore.open(sys.argv[1]) as library, library.create(making.manifest(), making.document()) as writer:
    writer.put_prefix({part: making.rows(part, 0, 3).data for part in ("large", "small")})
    for _ in range(int(sys.argv[2])):
        making.append(writer)
    print("waiting", flush=True)
    time.sleep(60)
"""
CREATE_IN_A_LOOP = """
import sys
import memstore
from tests.store import making
with memstore.open(sys.argv[1]) as library:
    while True:
        if "esther" in library:
            del library["esther"]
        with library.create(making.manifest(), making.document()) as writer:
            print(writer.num_done, flush=True)
            making.fill(writer)
"""


def start(library: MemoryStore, blocks: int) -> MemoryWriter:
    writer = library.create(making.manifest(), making.document())
    writer.put_prefix({part: making.rows(part, 0, 3).data for part in ("large", "small")})
    for _ in range(blocks):
        making.append(writer)
    return writer


def waiting(library: MemoryStore, blocks: int) -> subprocess.Popen[str]:
    process = making.child(WRITE, library.path, blocks)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


def test_nothing_is_visible_before_it_is_complete(library: MemoryStore) -> None:
    with start(library, 4) as writer:
        assert library.names() == []
        assert "esther" not in library
        with pytest.raises(MemoryNotFoundError):
            library["esther"]
        with pytest.raises(StoreError, match="256 of 300 tokens"):
            writer.finish()
        making.append(writer)
        assert library.names() == []
        writer.finish()
    making.check(library["esther"], "open")


@pytest.mark.parametrize("blocks", range(6))
def test_an_interrupted_memory_is_resumed(library: MemoryStore, blocks: int) -> None:
    whole = making.write(library, "whole").manifest.digest
    with start(library, blocks) as writer:
        first = writer.manifest
    with library.create(making.manifest(), making.document()) as writer:
        assert writer.num_done == min(blocks * making.BLOCK, making.TOKENS)
        assert (writer.manifest.id, writer.manifest.created) == (first.id, first.created)
        memory = making.fill(writer)
    assert memory.manifest.digest == whole
    making.check(memory, "open")
    assert len(library.records.memory_ids()) == 2
    assert list((library.path / "locks").iterdir()) == []


def test_a_killed_writer_is_resumed_and_ends_equal(library: MemoryStore) -> None:
    whole = making.write(library, "whole").manifest.digest
    process = waiting(library, 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert library.names() == ["whole"]
    with library.create(making.manifest(), making.document()) as writer:
        assert writer.num_done == 3 * making.BLOCK
        assert making.fill(writer).manifest.digest == whole
    making.check(library["esther"], "open")


def test_a_writer_killed_at_any_moment_leaves_a_store_that_works(library: MemoryStore) -> None:
    chance = random.Random(5)
    for _ in range(12):
        process = making.child(CREATE_IN_A_LOOP, library.path)
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(chance.random() * 0.2)
        process.kill()
        process.communicate()
        with memstore.open(library.path) as opened:
            for name in opened:
                making.check(opened[name], "open")
            pending = opened.records.items(PENDING)
            assert len(opened.records.memory_ids()) <= len(opened) + len(pending)
    with memstore.open(library.path) as opened:
        if "esther" in opened:
            del opened["esther"]
        making.check(making.write(opened), "open")


def test_a_second_process_is_told_that_the_name_is_busy(library: MemoryStore) -> None:
    process = waiting(library, 1)
    for batch_size in (1, 2):
        with pytest.raises(MemoryBusyError, match="'esther'"):
            library.create(making.manifest(batch_size=batch_size), making.document())
    with pytest.raises(MemoryBusyError):
        del library["esther"]
    with memstore.open(library.path) as another:  # opening a store must not disturb who is writing
        making.write(another, "ruth")
    process.kill()
    process.communicate()
    making.check(making.write(library))


def test_the_same_process_is_told_so_too(library: MemoryStore) -> None:
    with start(library, 1), pytest.raises(MemoryBusyError):
        library.create(making.manifest(), making.document())
    library.create(making.manifest(), making.document()).close()


def test_a_store_cannot_be_closed_while_a_memory_is_written(library: MemoryStore) -> None:
    with start(library, 1), pytest.raises(StoreInUseError):
        library.close()


def test_what_another_manifest_left_is_dropped(library: MemoryStore) -> None:
    with start(library, 2) as writer:
        old = writer.manifest.id
    with library.create(making.manifest(document_digest="1"), making.document()) as writer:
        assert writer.num_done == 0
        assert library.records.memory_ids() == [writer.manifest.id] != [old]
        making.fill(writer)
    making.check(library["esther"])


def test_what_an_interruption_left_can_be_removed(library: MemoryStore) -> None:
    start(library, 2).close()
    del library["esther"]
    assert library.records.memory_ids() == []
    assert list((library.path / "locks").iterdir()) == []
    with pytest.raises(MemoryNotFoundError):
        del library["esther"]


def test_a_memory_finished_by_another_process_meanwhile(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    start(library, 2).close()
    get, calls = library.records.get, []

    def slow(key_: bytes) -> bytes | None:
        value = get(key_)
        calls.append(key_)
        if len(calls) == 2:  # after both manifests were looked up, before the lock is taken
            with memstore.open(library.path) as another:
                making.write(another)
        return value

    monkeypatch.setattr(library.records, "get", slow)
    with pytest.raises(MemoryExistsError):
        library.create(making.manifest(), making.document())
    assert list((library.path / "locks").iterdir()) == []


def test_a_memory_removed_while_it_is_written_is_not_finished(library: MemoryStore) -> None:
    with start(library, 5) as writer:
        library.records.commit({}, [key(PENDING, "esther")])
        with pytest.raises(StoreError, match="removed"):
            writer.finish()
    assert library.names() == []


def test_an_interrupted_removal_is_completed_by_the_next_opening(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library, "ruth")
    making.write(library)

    def fail(memory_id: str) -> None:
        raise StoreError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(library.records, "delete", fail)
        with pytest.raises(StoreError, match="power cut"):
            del library["esther"]
    assert library.names() == ["ruth"]
    assert len(library.records.memory_ids()) == 2
    memstore.open(library.path, "r").close()
    assert len(library.records.memory_ids()) == 2
    memstore.open(library.path).close()
    assert len(library.records.memory_ids()) == 1
    assert library.records.items(b"t") == []
    making.check(library["ruth"])


def test_a_damaged_interrupted_memory_is_written_anew(library: MemoryStore) -> None:
    with start(library, 3) as writer:
        data = library.path / "memories" / writer.manifest.id / "data.mdb"
    os.truncate(data, data.stat().st_size - 4096)
    with library.create(making.manifest(), making.document()) as writer:
        assert writer.num_done == 0
        making.fill(writer)
    making.check(library["esther"], "open")


def test_blocks_of_wrong_parts_or_sizes_are_refused(library: MemoryStore) -> None:
    large, small = making.rows("large", 0, 64), making.rows("small", 0, 64)
    with library.create(making.manifest(), making.document()) as writer:
        blocks: list[dict[str, Any]] = [
            {"large": large.data},
            {"large": large.data, "small": small.data, "other": small.data},
            {"large": large[:63].data, "small": small.data},
            {"large": large.data, "small": b""},
        ]
        for block in blocks:
            with pytest.raises(DocumentError):
                writer.append(block)
        with pytest.raises(DocumentError, match="24 bytes instead of 36"):
            writer.put_prefix({"large": large[:3].data, "small": small[:2].data})
        with pytest.raises(StoreError, match="0 of 300"):
            writer.finish()
        making.fill(writer)
    making.check(library["esther"], "open")
    with pytest.raises(StoreError, match="no longer open"):
        writer.put_prefix({"large": large[:3].data, "small": small[:3].data})


def test_a_missing_prefix_is_noticed(library: MemoryStore) -> None:
    with library.create(making.manifest(), making.document()) as writer:
        while writer.num_done < making.TOKENS:
            making.append(writer)
        with pytest.raises(DocumentError, match="already holds"):
            making.append(writer)
        with pytest.raises(StoreError, match="not complete"):
            writer.finish()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def occupy(folder: Path, left: int = 0) -> Path:
    """Fill the disk but for ``left`` bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(b"\0" * 4096)
    os.truncate(filler, filler.stat().st_size - left)
    return filler


@pytest.mark.parametrize("left", [0, 4096, 8192, 16384, 65536, 131072])
def test_a_full_disk_costs_nothing_that_was_complete(small_disk: Path, left: int) -> None:
    with memstore.open(small_disk / "library") as library:
        making.write(library)
        filler = occupy(small_disk, left)
        with pytest.raises(StoreFullError, match="disk"):
            for i in range(9):
                making.write(library, f"more {i}")
        making.check(library["esther"], "open")
        filler.unlink()
        names = library.names()
        making.check(making.write(library, f"more {len(names) - 1}"), "open")


def test_a_full_disk_can_be_freed_by_removing_a_memory(small_disk: Path) -> None:
    with memstore.open(small_disk / "library") as library:
        for name in ("esther", "ruth"):
            making.write(library, name)
        occupy(small_disk)
        del library["esther"]
        assert library.names() == ["ruth"]
        making.check(making.write(library, "esther"), "open")


def test_the_same_writer_goes_on_once_there_is_space(small_disk: Path) -> None:
    with memstore.open(small_disk / "library") as library, start(library, 1) as writer:
        filler = occupy(small_disk)
        with pytest.raises(StoreFullError):
            while writer.num_done < making.TOKENS:
                making.append(writer)
        filler.unlink()
        making.check(making.fill(writer), "open")


def test_a_store_cannot_be_created_on_a_full_disk(small_disk: Path) -> None:
    filler = occupy(small_disk)
    with pytest.raises(StoreFullError):
        memstore.open(small_disk / "library")
    filler.unlink()
    with memstore.open(small_disk / "library") as library:
        making.check(making.write(library))


def test_parts_may_be_given_as_any_buffer(library: MemoryStore) -> None:
    with library.create(making.manifest(), making.document()) as writer:
        kinds: list[Any] = [bytes, bytearray, memoryview, np.asarray, lambda array: array.reshape(-1).data]
        for kind in kinds:
            stop = min(writer.num_done + making.BLOCK, making.TOKENS)
            arrays = {part: making.rows(part, writer.num_done, stop) for part in ("large", "small")}
            writer.append({part: kind(array) for part, array in arrays.items()})
        making.check(making.fill(writer), "open")
