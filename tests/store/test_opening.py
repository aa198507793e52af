"""Opening a store: what is one, in which format, and what may be read and written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest

import memstore
from memstore.catalog import FORMAT, SEALED, key
from memstore.errors import (
    FormatError,
    ReadOnlyStoreError,
    StoreError,
    StoreNotFoundError,
)
from memstore.store import MemoryStore
from memstore_backends.lmdb_errors import translated
from tests.store import making


def test_a_store_must_exist_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match='mode="a"'):
        memstore.open(tmp_path / "missing", "r")
    assert not (tmp_path / "missing").exists()
    with pytest.raises(StoreNotFoundError):
        memstore.open(tmp_path, "r")
    with pytest.raises(ValueError, match="mode"):
        memstore.open(tmp_path, "w")  # type: ignore[arg-type]


def test_other_files_are_never_taken_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="no store"):
        memstore.open(tmp_path)
    with pytest.raises(StoreError):
        memstore.open(tmp_path / "thesis.txt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "record",
    [
        msgpack.packb({"format": "memstore", "major": 2, "minor": 0}),
        msgpack.packb({"format": "another", "major": 1, "minor": 0}),
        msgpack.packb([1]),
        b"\xc1",
        None,
    ],
)
def test_an_unknown_format_is_refused(library: MemoryStore, record: bytes | None) -> None:
    making.write(library)
    library.records.commit({} if record is None else {FORMAT: record}, [FORMAT])
    for mode in ("a", "r"):
        with pytest.raises(FormatError):
            memstore.open(library.path, mode)
    making.check(library["esther"])


def test_a_memory_of_a_newer_format_is_refused_and_the_others_are_not(library: MemoryStore) -> None:
    making.write(library, "old")
    memory = making.write(library, "new")
    newer = memory.manifest.model_copy(update={"format_major": 2})
    library.records.commit({key(SEALED, "new"): newer.pack()})
    making.check(library["old"])
    with pytest.raises(FormatError, match="'new' has format 2"):
        library["new"]
    with pytest.raises(FormatError, match="'new' has format 2"):
        library.names()
    del library["new"]
    assert library.names() == ["old"]


def test_a_read_only_folder_is_read(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    making.write(library)
    library.close()
    (library.path / "catalog" / "lock.mdb").unlink()
    monkeypatch.setattr(os, "access", lambda path, kind: False)  # as for a user who may not write here
    with memstore.open(library.path, "r") as reading:
        making.check(reading["esther"])
    assert sorted(entry.name for entry in (library.path / "catalog").iterdir()) == ["data.mdb"]


def test_a_store_that_cannot_be_written_says_so_and_stays_readable(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    open_ = lmdb.open

    def read_only(*positional: Any, **keywords: Any) -> Any:
        if not keywords.get("readonly"):
            raise lmdb.ReadonlyError("open", errno.EROFS)
        return open_(*positional, **keywords)

    monkeypatch.setattr(lmdb, "open", read_only)
    with pytest.raises(ReadOnlyStoreError, match='mode="r"'):
        memstore.open(library.path)
    with memstore.open(library.path, "r") as reading:
        with pytest.raises(ReadOnlyStoreError, match='mode="r"'):
            memstore.open(library.path)
        making.check(reading["esther"])


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write into read-only folders")
def test_a_folder_without_write_permission(library: MemoryStore) -> None:
    making.write(library)
    library.close()
    folders = [library.path, *(entry for entry in library.path.rglob("*"))]
    for entry in folders:
        entry.chmod(entry.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        with pytest.raises(ReadOnlyStoreError, match='mode="r"'):
            memstore.open(library.path)
        with memstore.open(library.path, "r") as reading:
            making.check(reading["esther"])
    finally:
        for entry in folders:
            entry.chmod(entry.stat().st_mode | stat.S_IWUSR)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
@pytest.mark.parametrize("closed", [".", "catalog/data.mdb", "memories"])
def test_what_must_not_be_read_is_not_said_to_be_read_only(library: MemoryStore, closed: str) -> None:
    making.write(library)
    library.close()
    (library.path / closed).chmod(0)
    try:
        with pytest.raises(StoreError, match="cannot be read") as caught, memstore.open(library.path, "r") as reading:
            reading["esther"].open()
        assert not isinstance(caught.value, ReadOnlyStoreError)
    finally:
        (library.path / closed).chmod(0o755)


@pytest.mark.parametrize("path", ["{}/loop", "a\0b", "x" * 5000])
def test_a_path_that_no_store_can_have(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for mode in ("a", "r"):
        with pytest.raises(StoreError):
            memstore.open(path.format(tmp_path), mode)


@pytest.mark.parametrize("change", ["moved", "removed", "replaced by a copy"])
def test_a_store_that_is_no_longer_where_it_was_opened_takes_nothing_more(tmp_path: Path, change: str) -> None:
    """What would be written to its catalog would be lost."""
    path = tmp_path / "store"
    with memstore.open(path) as store:
        memory = making.write(store)
        with memory.open() as opened:
            if change == "removed":
                shutil.rmtree(path)
            else:
                path.rename(tmp_path / "moved")
            if change == "replaced by a copy":
                shutil.copytree(tmp_path / "moved", path)
            for ask in (store.names, lambda: making.write(store, "ruth"), lambda: store.__delitem__("esther")):
                with pytest.raises(StoreError, match="moved or replaced. Open it anew"):
                    ask()
            assert opened.rows("large", 0, 3).shape == (3, 40)  # who has a memory open keeps reading it
    if change != "removed":
        with memstore.open(tmp_path / "moved") as store:
            assert store.names() == ["esther"]
            making.check(store["esther"])


@pytest.mark.parametrize("mode", ["a", "r"])
def test_what_is_no_folder_is_no_store(tmp_path: Path, mode: Any) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "file", tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(StoreError, match="is no folder, and so no store"):
            memstore.open(path, mode)


def test_the_path_of_a_store_need_not_be_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with memstore.open(path) as store:
        making.write(store)
        assert store.verify()[0].ok
    with memstore.open(path, "r") as store:
        making.check(store["esther"])


@pytest.mark.parametrize(
    ("code", "filename", "kind", "message"),
    [
        (
            errno.EROFS,
            None,
            ReadOnlyStoreError,
            r'{store} cannot be written: Read-only .* The store can be read \(mode="r"\)',
        ),
        (errno.EACCES, "x.lock", ReadOnlyStoreError, "{file} cannot be written: Permission denied. "),
        (errno.EACCES, b"x.lock", ReadOnlyStoreError, "{file} cannot be written: Permission denied. "),
        (errno.ELOOP, "x.lock", StoreError, "{file}: Too many levels"),
        (errno.ELOOP, 3, StoreError, "{store}: Too many levels"),
    ],
)
def test_what_the_system_says_is_told_in_its_words(
    tmp_path: Path, code: int, filename: Any, kind: type[StoreError], message: str
) -> None:
    file = tmp_path / "x.lock"
    file.touch()
    if isinstance(filename, str | bytes):
        filename = str(file) if isinstance(filename, str) else bytes(file)
    with pytest.raises(kind) as caught, translated(tmp_path):
        raise OSError(code, os.strerror(code), filename)
    assert type(caught.value) is kind and "Errno" not in str(caught.value)
    assert re.match(message.format(store=tmp_path, file=file), str(caught.value))
