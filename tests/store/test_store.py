"""Keeping memories and finding them again."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstore
from memstore import registry
from memstore.catalog import SEALED, key
from memstore.errors import (
    ConfigError,
    DocumentError,
    FormatError,
    MemoryExistsError,
    MemoryNotFoundError,
    PluginError,
    StoreError,
)
from memstore.manifest import Manifest
from memstore.memory import Document, Memory
from memstore.store import MemoryStore
from tests.store import making

CHECK = """
import sys
import memstore
from tests.store import making
with memstore.open(sys.argv[1], sys.argv[2]) as library:
    for name in library:
        making.check(library[name])
        print(name)
"""


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


def test_a_list_reads_no_more_of_a_manifest_than_it_tells(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = making.write(library).manifest
    manifests = [sealed.model_copy(update={"name": f"{i:03}", "id": f"{i:032x}"}) for i in range(200)]
    library.records.commit({key(SEALED, manifest.name): manifest.pack() for manifest in manifests})
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "unpack", None)
        memories = library.memories()
        told = [
            (each.name, each.created, each.kind, each.num_tokens, each.nbytes, each.fingerprint, each.metadata)
            for each in memories
        ]
    assert told == [
        (each.name, 1.5, "hidden", making.TOKENS, Memory(library, sealed).nbytes, {"model": "none"}, sealed.metadata)
        for each in [*manifests, sealed]
    ]
    assert [memory.manifest for memory in memories] == [*manifests, sealed]
    assert library.names() == [each.name for each in memories]
    assert len(library) == 201
    assert "199" in library


@pytest.mark.parametrize("record", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"format_major": 1}), b"\x81\xa1a"])
def test_a_record_that_is_no_manifest_is_told(library: MemoryStore, record: bytes) -> None:
    library.records.commit({key(SEALED, "esther"): record})
    with pytest.raises(FormatError, match="no manifest"):
        library.names()


def test_the_store_loads_no_torch(library: MemoryStore) -> None:
    making.write(library)
    code = """
import sys
import memstore
with memstore.open(sys.argv[1]) as library:
    library.names(), library["esther"].passage(0, 9), library["esther"].open("open").close(), library.verify()
    del library["esther"]
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    assert making.in_child(code, library.path) == "[]\n"


def test_a_backend_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="'lmbd'"):
        memstore.open(tmp_path / "library", records="lmbd")
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


GOSPELS = ("gospel-john", "gospel-mark", "Gospel-luke", "acts", "[draft]")


@pytest.fixture
def gospels(library: MemoryStore) -> MemoryStore:
    for i, name in enumerate(GOSPELS):
        metadata = {"author": "unknown" if i % 2 else name, "year": None} if i < 4 else {}
        with library.create(making.manifest(name, metadata=metadata), making.document()) as writer:
            making.fill(writer)
    return library


CHOICES: list[tuple[str | None, Any, list[str]]] = [
    (None, None, ["Gospel-luke", "[draft]", "acts", "gospel-john", "gospel-mark"]),
    ("gospel-*", None, ["gospel-john", "gospel-mark"]),
    ("?ospel-[jl]*", None, ["Gospel-luke", "gospel-john"]),
    ("gospel", None, []),
    ("[draft]", None, []),  # a pattern of one letter
    ("[[]draft]", None, ["[draft]"]),
    (None, {"author": "unknown"}, ["acts", "gospel-mark"]),
    ("gospel-*", {"author": "unknown", "year": None}, ["gospel-mark"]),
    (None, {"year": None}, ["Gospel-luke", "acts", "gospel-john", "gospel-mark"]),  # one without years has none
    (None, {"year": 1}, []),
    (None, {}, ["Gospel-luke", "[draft]", "acts", "gospel-john", "gospel-mark"]),
    ("*-*", lambda metadata: "-" in metadata["author"], ["Gospel-luke", "gospel-john"]),
    (None, lambda metadata: not metadata, ["[draft]"]),
]


@pytest.mark.parametrize(("pattern", "where", "names"), CHOICES, ids=range(len(CHOICES)))
def test_memories_are_selected_by_name_and_metadata(
    gospels: MemoryStore, pattern: str | None, where: Any, names: list[str]
) -> None:
    assert [memory.name for memory in gospels.select(pattern, where=where)] == names
    if names:
        del gospels[names[0]]
        assert [memory.name for memory in gospels.select(pattern, where=where)] == names[1:]


@pytest.mark.parametrize(
    ("pattern", "where", "message"),
    [
        (3, None, "pattern=3 must be a text"),
        (b"gospel", None, "pattern=b'gospel' must be a text"),
        (None, "unknown", "where='unknown' must be a mapping"),
        (None, ["author"], "or a function of metadata"),
        (None, {3: "unknown"}, "and 3 is none"),
    ],
)
def test_what_selects_nothing_that_can_be_is_refused(
    library: MemoryStore, pattern: Any, where: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        library.select(pattern, where=where)
