"""The catalog between processes and after errors: what it holds open, and what it takes for damage."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from memstore.errors import DamagedMemoryError
from memstore_backends import lmdb_catalog, lmdb_problems, lmdb_summary
from memstore_backends.lmdb_catalog import Catalog
from tests.store import making

LAST_PAGE = 136  # the offset of its number in a meta page
COMMIT = """
import sys
from pathlib import Path
from memstore_backends.lmdb_catalog import Catalog
print("begun", flush=True)
Catalog.acquire(Path(sys.argv[1]), True).commit({b"theirs": b"2"}, [], {})
print("done", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "catalog"
    folder.mkdir()
    catalog = Catalog.acquire(folder, writable=True)
    catalog.commit({b"ours": b"1"}, [], {})
    catalog.release()
    return folder


@pytest.fixture
def catalog(folder: Path) -> Iterator[Catalog]:
    opened = Catalog.acquire(folder, writable=True)
    yield opened
    opened.release()


def test_pages_are_walked_while_nobody_else_can_change_them(
    catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = []

    def walk(data: Path) -> str | None:
        other = making.child(COMMIT, folder)
        others.append(other)
        assert other.stdout is not None and other.stdout.readline() == "begun\n"
        assert select.select([other.stdout], [], [], 0.3)[0] == []
        return found(data)

    found = lmdb_problems.problem_of
    monkeypatch.setattr("memstore_backends.lmdb_catalog.problem_of", walk)
    assert catalog.commit({b"mine": b"3"}, [], {})
    assert catalog.commit({b"mine": b"4"}, [], {b"mine": b"3"})  # they are walked once
    (other,) = others
    assert other.communicate()[0] == "done\n"
    assert catalog.items(b"") == [(b"mine", b"4"), (b"ours", b"1"), (b"theirs", b"2")]


def test_a_commit_that_only_compares_writes_nothing_and_walks_first(
    catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "data.mdb").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("memstore_backends.lmdb_catalog.problem_of", lambda data: "a page is damaged")
        with pytest.raises(DamagedMemoryError, match="a page is damaged"):
            catalog.commit({}, [], {b"ours": b"1"})
    assert catalog.commit({}, [], {b"ours": b"1"})
    assert not catalog.commit({}, [], {b"ours": b"2"})
    assert (folder / "data.mdb").read_bytes() == before


def open_files() -> set[Path]:
    """What the descriptors of this process lead to."""
    return {fd.resolve() for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


@pytest.mark.parametrize("reader", [False, True], ids=["closed", "open for reading"])
def test_what_cannot_be_opened_for_writing_is_not_held(
    folder: Path, reader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Catalog.acquire(folder, writable=False) if reader else None
    before = open_files()

    def fail(self: Catalog, write: bool) -> Any:
        raise lmdb.Error("it cannot begin")

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "_begin", fail)
        with pytest.raises(Exception, match="it cannot begin"):
            Catalog.acquire(folder, writable=True)
    assert open_files() == before
    assert Catalog.is_open(folder) is reader
    if holder is not None:
        assert holder.items(b"") == [(b"ours", b"1")]
        holder.release()
    assert not Catalog.is_open(folder)


def test_pages_that_do_not_fit_into_the_file_are_damage_and_no_map_is_made_for_them(
    catalog: Catalog, folder: Path
) -> None:
    data = bytearray((folder / "data.mdb").read_bytes())
    for number in (0, 1):
        at = number * 4096 + LAST_PAGE
        data[at : at + 8] = (1 << 40).to_bytes(8, "little")
    (folder / "data.mdb").write_bytes(data)
    with pytest.raises(DamagedMemoryError, match="pages do not fit into its length"):
        catalog.items(b"")


def test_it_counts_as_open_when_its_file_is_gone(catalog: Catalog, folder: Path) -> None:
    (folder / "data.mdb").unlink()
    assert Catalog.is_open(folder)


def test_a_value_that_is_read_while_it_is_written_is_read_again(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(data: Path, key: bytes, value: bytes | None) -> bytes | None:
        if key == b"ours" and not seen:
            seen.append(key)
            raise DamagedMemoryError("torn")
        return whole(data, key, value)

    seen: list[bytes] = []
    whole = lmdb_summary.opened
    monkeypatch.setattr(lmdb_catalog, "opened", torn)
    assert catalog.get(b"ours") == b"1"
    assert seen


def test_a_child_that_is_forked_while_another_thread_reads_is_not_held_up(catalog: Catalog) -> None:
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            catalog.items(b"")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(10):
            child = os.fork()
            if child == 0:
                os._exit(catalog.get(b"ours") != b"1" or not catalog.commit({b"child": bytes([i])}, [], {}))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert catalog.get(b"child") == bytes([i])
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_forked_child_does_not_take_its_parents_slot_away(catalog: Catalog) -> None:
    catalog.get(b"ours")
    child = os.fork()
    if child == 0:
        os._exit(catalog.get(b"ours") != b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with catalog._transaction():
        assert f" {os.getpid()} " in catalog._opened().readers()
