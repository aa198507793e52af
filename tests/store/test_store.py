"""Keeping memories and finding them again."""

from __future__ import annotations

import errno
import gc
import os
import stat
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore import registry, store
from memstore.catalog import FORMAT, SEALED, key
from memstore.errors import (
    DocumentError,
    FormatError,
    MemoryExistsError,
    MemoryNotFoundError,
    PluginError,
    ReadOnlyStoreError,
    StoreError,
    StoreInUseError,
    StoreNotFoundError,
)
from memstore.memory import Document
from memstore.store import MemoryStore
from tests.store import making

CHECK = """
import sys
from memstore import store
from tests.store import making
with store.open(sys.argv[1], sys.argv[2]) as library:
    for name in library:
        making.check(library[name])
        print(name)
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[MemoryStore]:
    opened = store.open(tmp_path / "library")
    yield opened
    opened.close()


def test_another_process_reads_what_was_written(library: MemoryStore) -> None:
    written = making.write(library, "esther")
    making.check(written)
    assert making.in_child(CHECK, library.path, "r") == "esther\n"
    assert making.in_child(CHECK, library.path, "a") == "esther\n"


def test_a_memory_tells_what_it_is(library: MemoryStore) -> None:
    making.write(library)
    memory = library["esther"]
    assert (memory.name, memory.num_tokens, memory.kind) == ("esther", making.TOKENS, "hidden")
    assert memory.metadata == {"author": "unknown", "year": None}
    assert memory.fingerprint == {"model": "none"}
    data = library.path / "memories" / memory.manifest.id / "data.mdb"
    assert memory.nbytes == data.stat().st_size
    assert "esther" in repr(memory)
    assert str(library.path) in repr(library)


def test_passages_follow_the_offsets(library: MemoryStore) -> None:
    memory = making.write(library)
    assert memory.chars(0, making.TOKENS) == (1, making.TOKENS - 1)
    assert memory.chars(0, 1) == (0, 0)
    assert memory.chars(5, 5) == (0, 0)
    assert memory.passage(3, 8) == making.TEXT[3:8]
    with pytest.raises(IndexError):
        memory.chars(3, making.TOKENS + 1)


def test_a_document_may_have_neither_text_nor_tokens(library: MemoryStore) -> None:
    with library.create(making.manifest(has_text=False, has_ids=False), Document()) as writer:
        memory = making.fill(writer)
    assert (memory.text, memory.token_ids, memory.offsets) == (None, None, None)
    with pytest.raises(StoreError, match="no character offsets"):
        memory.passage(0, 1)


def test_rows_are_views_within_a_block_and_copies_across(library: MemoryStore) -> None:
    with making.write(library).open() as opened:
        block = opened.block("large", 1)
        assert opened.rows("large", 70, 80).data_ptr() == block[6:].data_ptr()
        for start, stop in ((0, 0), (63, 65), (64, 128), (299, 300), (300, 300), (0, 300)):
            np.testing.assert_array_equal(opened.rows("large", start, stop), making.rows("large", start, stop))
        for start, stop in ((-1, 2), (5, 4), (0, 301)):
            with pytest.raises(IndexError):
                opened.rows("large", start, stop)
        with pytest.raises(IndexError):
            opened.block("large", 5)
        with pytest.raises(KeyError):
            opened.blocks("medium")
        assert all(block.data_ptr() % 16 == 0 for part in ("large", "small") for block in opened.blocks(part))


def test_a_memory_without_a_prefix_has_an_empty_one(library: MemoryStore) -> None:
    with library.create(making.manifest(prefix_ids=()), making.document()) as writer:
        while writer.num_done < making.TOKENS:
            making.append(writer)
        memory = writer.finish()
    with memory.open() as opened:
        assert opened.prefix("small").shape == (0, 2, 3)


def test_reading_gives_no_warning(library: MemoryStore, recwarn: pytest.WarningsRecorder) -> None:
    making.check(making.write(library), "open")
    assert not recwarn.list


NAMES = [
    "/",
    "..",
    "../../etc/passwd",
    "a/b",
    "CON",
    " ",
    "\n",
    "\u00e9",
    "e\u0301",
    "мир",
    "🦜" * 200,
    "x" * 3000,
    "\x01",
]


def test_any_name(library: MemoryStore) -> None:
    for name in NAMES:
        making.write(library, name)
    assert library.names() == sorted(NAMES) == list(library)
    assert all(library[name].name == name and name in library for name in NAMES)
    assert {entry.name for entry in library.path.iterdir()} == {"catalog", "memories", "locks"}
    for name in NAMES:
        del library[name]
    assert len(library) == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(st.characters(exclude_categories=()), max_size=400))
def test_a_name_is_kept_or_refused(library: MemoryStore, name: str) -> None:
    allowed = name != "" and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name)
    assert name not in library
    with pytest.raises(MemoryNotFoundError):
        library[name]
    if not allowed:
        with pytest.raises(DocumentError, match="name"):
            library.create(making.manifest(name), making.document())
        with pytest.raises(MemoryNotFoundError):
            del library[name]
        return
    library.create(making.manifest(name), making.document()).close()
    assert name not in library
    del library[name]


def test_a_name_is_never_overwritten(library: MemoryStore) -> None:
    making.write(library)
    with pytest.raises(MemoryExistsError, match="'esther'"):
        library.create(making.manifest(), making.document())


@pytest.mark.parametrize(
    ("changes", "text", "ids", "message"),
    [
        ({"has_text": False}, "x", True, "having a text"),
        ({"has_ids": False}, making.TEXT, True, "token ids"),
        ({"num_tokens": 299}, making.TEXT, True, "shape"),
        ({"digest": "0"}, making.TEXT, True, "draft"),
        ({"metadata": {"a": "\ud800"}}, making.TEXT, True, "metadata"),
        ({"metadata": {"a": 2**70}}, making.TEXT, True, "metadata"),
        ({}, "\udfff", True, "text"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(
    library: MemoryStore, changes: dict[str, Any], text: str, ids: bool, message: str
) -> None:
    whole = making.document()
    with pytest.raises(DocumentError, match=message):
        library.create(making.manifest(**changes), Document(text, whole.token_ids if ids else None, whole.offsets))
    assert library.records.items(b"p") == []
    assert library.records.memory_ids() == []


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
    with pytest.raises(ZeroDivisionError), store.open(tmp_path / "a") as library:
        opened = making.write(library).open()
        raise ZeroDivisionError
    opened.close()
    with pytest.raises(StoreInUseError), store.open(tmp_path / "b") as library:
        opened = making.write(library).open()


def test_tensors_outlive_everything(tmp_path: Path) -> None:
    with store.open(tmp_path / "library") as library:
        with making.write(library).open() as opened:
            tensor = opened.block("large", 2)
        with pytest.raises(StoreError, match="no longer open"):
            opened.block("large", 2)
        del library["esther"]
    del opened, library
    gc.collect()
    assert torch.equal(tensor, torch.from_numpy(making.rows("large", 128, 192)))


def test_one_store_may_be_opened_many_times_in_a_process(library: MemoryStore) -> None:
    with store.open(library.path, "r") as reading, store.open(library.path) as writing:
        making.write(writing, "ruth")
        assert reading.names() == library.names() == ["ruth"]
    assert library.names() == ["ruth"]


def test_a_reading_store_lets_another_write_in_the_same_process(tmp_path: Path) -> None:
    store.open(tmp_path / "library").close()
    with store.open(tmp_path / "library", "r") as reading:
        with store.open(tmp_path / "library") as writing:
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
from memstore import store
with store.open(sys.argv[1], "r") as library:
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


def test_a_store_must_exist_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match='mode="a"'):
        store.open(tmp_path / "missing", "r")
    assert not (tmp_path / "missing").exists()
    with pytest.raises(StoreNotFoundError):
        store.open(tmp_path, "r")
    with pytest.raises(ValueError, match="mode"):
        store.open(tmp_path, "w")  # type: ignore[arg-type]


def test_other_files_are_never_taken_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="no store"):
        store.open(tmp_path)
    with pytest.raises(StoreError):
        store.open(tmp_path / "thesis.txt")
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
            store.open(library.path, mode)
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
    with store.open(library.path, "r") as reading:
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
        store.open(library.path)
    with store.open(library.path, "r") as reading:
        with pytest.raises(ReadOnlyStoreError, match='mode="r"'):
            store.open(library.path)
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
            store.open(library.path)
        with store.open(library.path, "r") as reading:
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
        with pytest.raises(StoreError, match="cannot be read") as caught, store.open(library.path, "r") as reading:
            reading["esther"].open()
        assert not isinstance(caught.value, ReadOnlyStoreError)
    finally:
        (library.path / closed).chmod(0o755)


@pytest.mark.parametrize("path", ["{}/loop", "a\0b", "x" * 5000])
def test_a_path_that_no_store_can_have(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for mode in ("a", "r"):
        with pytest.raises(StoreError):
            store.open(path.format(tmp_path), mode)


def test_two_thousand_memories_are_listed(library: MemoryStore) -> None:
    sealed = making.write(library).manifest
    puts = {}
    for i in range(2000):
        manifest = sealed.model_copy(update={"name": f"{i:04}", "id": f"{i:032x}"})
        puts[key(SEALED, manifest.name)] = manifest.pack()
    library.records.commit(puts)
    start = time.process_time()
    names = library.names()
    print(f"{time.process_time() - start:.3f} s for {len(names)} memories")
    assert names == [*(f"{i:04}" for i in range(2000)), "esther"]
    assert len(library) == 2001
    assert "1999" in library


def test_the_store_loads_no_torch(library: MemoryStore) -> None:
    making.write(library)
    code = """
import sys
from memstore import store
with store.open(sys.argv[1]) as library:
    library.names(), library["esther"].passage(0, 9), library["esther"].open("open").close(), library.verify()
    del library["esther"]
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    assert making.in_child(code, library.path) == "[]\n"


def test_a_backend_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="'lmbd'"):
        store.open(tmp_path / "library", records="lmbd")
    assert registry.load(registry.BACKENDS, "lmdb").__name__ == "LmdbRecords"


def test_encode_passes_everything_on(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    memory = making.write(library)

    def encode(*positional: object, **keywords: object) -> object:
        seen.update(keywords, positional=positional)
        return memory

    module = types.ModuleType("memstore.encode")
    module.encode = encode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memstore.encode", module)
    assert library.encode("model", "tokenizer", "text", name="x", window=5) is memory
    assert seen.pop("positional") == (library, "model", "tokenizer", "text")
    assert {name: value for name, value in seen.items() if value is not None} == {"name": "x", "window": 5}
