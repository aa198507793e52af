"""Exporting and importing: byte-identical round trips, whatever interrupts them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore import describe, exchange, exporting, files, importing
from memstore.catalog import PENDING
from memstore.errors import (
    DamagedMemoryError,
    ExportError,
    MemoryExistsError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreFullError,
)
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter
from memstore.store import MemoryStore
from tests import tiny
from tests.store import making

NAMES = ["esther", "../../etc/passwd", "/", "..", "gospels/john", "né 你好 🙂", "x" * 300, "[b]", "Esther", " "]
LINE = "In the beginning was the Word, and the Word was with God.\n"


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written(store: MemoryStore, kind: str) -> Memory:
    """A memory of several blocks: of a stub, without a document, or of a tiny model behind a prefix, coded or not."""
    if kind == "stub":
        return making.write(store)
    if kind == "no document":
        draft = making.manifest(has_text=False, has_ids=False, prefix_ids=())
        with store.create(draft, Document()) as writer:
            while writer.num_done < making.TOKENS:
                making.append(writer)
            return writer.finish()
    dtype = None if kind == "kv" else kind
    return store.encode(
        tiny.llama(), tiny.tokenizer(), (LINE * 26)[:1500], name="esther", window=64, dtype=dtype, metadata={"n": [1.0]}
    )


@pytest.mark.parametrize("kind", ["stub", "no document", "kv", "float16", "int8", "int4"])
def test_a_round_trip_is_byte_identical(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)
    memory = written(library, kind)
    (folder,) = library.export(tmp_path / "out")
    (brought,) = other.import_from(tmp_path / "out")
    assert brought.name in other and memory.manifest.num_blocks > 1
    assert making.facts(brought) == making.facts(memory) and making.contents(brought) == making.contents(memory)
    assert brought.manifest.id != memory.manifest.id and other.verify()[0].ok
    other.export(tmp_path / "again")
    assert tree(tmp_path / "again") == tree(tmp_path / "out")
    assert {path.parent for path in map(Path, tree(tmp_path / "out"))} == {Path(folder.name)}


def test_all_names_are_exported_into_the_folder_and_come_back(
    library: MemoryStore, other: MemoryStore, tmp_path: Path
) -> None:
    for name in NAMES:
        making.write(library, name)
    folders = library.export(tmp_path / "out")
    assert {folder.parent for folder in folders} == {tmp_path / "out"} and len(set(folders)) == len(NAMES)
    assert all(folder.is_dir() and len(folder.name) < 60 for folder in folders)
    assert sorted((tmp_path / "out").iterdir()) == sorted(folders)
    other.import_from(tmp_path / "out")
    assert other.names() == sorted(NAMES)
    making.check(other["../../etc/passwd"], "open")
    assert {path.name for path in tmp_path.iterdir()} == {"library", "other", "out"}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_coded_vectors_are_read_by_other_programs(library: MemoryStore, tmp_path: Path, dtype: str) -> None:
    """The formula in docs/format.md, in numpy, over what safetensors itself loads."""
    memory = written(library, dtype)
    (folder,) = library.export(tmp_path / "out", "esther")
    tensors = load_file(folder / "block-00000.safetensors")
    rows = memory.num_tokens
    with memory.open() as opened:
        for part, spec in memory.manifest.parts.items():
            if not spec.is_coded:
                assert torch.equal(tensors[part], opened.block(part, 0))
                continue
            scales = tensors[f"{part}.scales"].float().numpy()
            codes = tensors[f"{part}.codes"].numpy()
            if dtype == "int4":
                codes = np.concatenate((codes & 15, codes >> 4), axis=1).reshape(rows, *spec.shape)
            spread: Callable[[Any], Any] = (
                (lambda table: table[..., None])
                if spec.scales == "token"
                else (lambda table: np.repeat(table, 64, axis=0)[:rows])
            )
            expected = codes * spread(scales)
            if dtype == "int4":
                expected = expected + spread(tensors[f"{part}.offsets"].float().numpy())
            np.testing.assert_allclose(opened.block(part, 0).numpy(), expected, rtol=1e-6, atol=1e-6)
    document = load_file(folder / "document.safetensors")
    np.testing.assert_array_equal(document["token_ids"].numpy(), memory.token_ids)
    np.testing.assert_array_equal(document["offsets"].numpy(), memory.offsets)
    assert (folder / "text.txt").read_text() == memory.text
    described = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert described["num_tokens"] == rows and described["metadata"] == {"n": [1.0]}


def test_the_same_export_again_changes_nothing_and_another_is_refused(library: MemoryStore, tmp_path: Path) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path)
    before = folder.stat().st_mtime_ns
    assert library.export(tmp_path) == [folder] and folder.stat().st_mtime_ns == before
    del library["esther"]
    making.write(library, created=2.5)
    with pytest.raises(ExportError, match="already exists and is no export of this memory"):
        library.export(tmp_path)


def test_what_a_killed_export_left_is_cleaned_up_and_never_imported(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    out = tmp_path / "out"
    put = files.write_synced
    calls = itertools.count()

    def dying(path: Path, chunks: list[Any]) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        put(path, chunks)

    with monkeypatch.context() as patch:
        patch.setattr("memstore.exporting.write_synced", dying)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if nothing ran any more
        with pytest.raises(KeyboardInterrupt):
            library.export(out)
    assert tree(out)
    with pytest.raises(ExportError, match="holds no exported memory"):
        other.import_from(out)
    (folder,) = library.export(out)
    assert list(out.iterdir()) == [folder]
    making.check(other.import_from(out)[0], "open")


def test_two_exports_to_one_place_do_not_disturb_each_other(library: MemoryStore, tmp_path: Path) -> None:
    making.write(library)
    name = exchange.folder_name("esther")
    with exporting._alone(tmp_path / f".{name}.lock"), pytest.raises(StoreBusyError):
        library.export(tmp_path)
    (folder,) = library.export(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.name != "library"] == [folder]


def test_a_damaged_memory_is_not_exported(library: MemoryStore, tmp_path: Path) -> None:
    memory = making.write(library)
    data = library.path / "memories" / memory.manifest.id / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole.replace(making.rows("large", 64, 128).tobytes()[:64], bytes(64)))
    with pytest.raises(DamagedMemoryError, match="'esther' is damaged"):
        library.export(tmp_path / "out")
    assert tree(tmp_path / "out") == {}


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_an_interrupted_import_is_invisible_and_goes_on(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    memory = making.write(library)
    library.export(tmp_path / "out")
    append, calls = MemoryWriter.append, itertools.count()

    def failing(self: MemoryWriter, block: Any) -> None:
        if next(calls) == stop:
            raise KeyboardInterrupt
        append(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryWriter, "append", failing)
        with pytest.raises(KeyboardInterrupt):
            other.import_from(tmp_path / "out")
    assert other.names() == [] and len(other.records.memory_ids()) == 1
    (brought,) = other.import_from(tmp_path / "out")
    assert (making.facts(brought), making.contents(brought)) == (making.facts(memory), making.contents(memory))
    assert len(other.records.memory_ids()) == 1 and other.records.items(PENDING) == []


@pytest.mark.parametrize("equal", [True, False])
def test_what_an_interrupted_encoding_left_under_the_name_does_not_matter(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, equal: bool
) -> None:
    """Even if it is of the same manifest, was begun at another time, and has other bytes."""
    memory = making.write(library)
    library.export(tmp_path / "out")
    with other.create(making.manifest(created=9.5), making.document()) as writer:
        block = {part: making.rows(part, 0, 64).data for part in ("large", "small")}
        writer.append(block if equal else {part: bytes(len(memoryview(b).cast("B"))) for part, b in block.items()})
    (brought,) = other.import_from(tmp_path / "out")
    assert (making.facts(brought), making.contents(brought)) == (making.facts(memory), making.contents(memory))
    assert len(other.records.memory_ids()) == 1


def test_a_name_that_is_taken(library: MemoryStore, other: MemoryStore, tmp_path: Path) -> None:
    making.write(library)
    library.export(tmp_path / "out")
    first = other.import_from(tmp_path / "out")[0].manifest
    assert other.import_from(tmp_path / "out")[0].manifest == first  # the same again
    assert library.import_from(tmp_path / "out")[0].manifest == library["esther"].manifest  # where it came from
    del other["esther"]
    making.write(other, metadata={})
    with pytest.raises(MemoryExistsError, match="differs in metadata"):
        other.import_from(tmp_path / "out")


def test_an_import_needs_a_store_that_can_be_written(library: MemoryStore, tmp_path: Path) -> None:
    making.write(library)
    with memstore.open(library.path, "r") as reading:
        reading.export(tmp_path / "out")
        with pytest.raises(ReadOnlyStoreError):
            reading.import_from(tmp_path / "out")


def test_a_full_disk_and_a_closed_folder(library: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    making.write(library)
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        library.export(tmp_path / "file")

    def full(path: Path, chunks: list[Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memstore.exporting.write_synced", full)
    with pytest.raises(StoreFullError, match="disk"):
        library.export(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("inside", ["", "memories", "locks", "catalog/new", "out"])
def test_nothing_is_exported_into_the_store_itself(library: MemoryStore, inside: str) -> None:
    making.write(library)
    before = sorted(library.path.rglob("*"))
    with pytest.raises(ExportError, match="lies in the store itself"):
        library.export(library.path / inside)
    assert sorted(library.path.rglob("*")) == before


@pytest.mark.parametrize("file", ["text.txt", "document.safetensors", "prefix.safetensors", "block-00001.safetensors"])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_an_export_that_lacks_something_does_not_pass_for_done(
    library: MemoryStore, tmp_path: Path, file: str, harm: Callable[[Path], None]
) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path / "out")
    assert library.export(tmp_path / "out") == [folder]
    harm(folder / file)
    with pytest.raises(ExportError, match=f"{file} is not as it was exported. Remove {folder}"):
        library.export(tmp_path / "out")
    shutil.rmtree(folder)
    assert library.export(tmp_path / "out") == [folder]


@pytest.mark.parametrize("harm", ["header", "cut in the middle", "lost in the middle"])
def test_what_is_found_damaged_on_the_way_leaves_nothing(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path / "out")
    block, fill = folder / "block-00002.safetensors", importing._fill
    if harm == "header":
        block.write_bytes(b"\xff" * 8 + block.read_bytes()[8:])

    def late(*arguments: Any) -> None:
        if harm == "cut in the middle":
            os.truncate(block, 100)
        elif harm == "lost in the middle":
            block.unlink()
        fill(*arguments)

    monkeypatch.setattr(importing, "_fill", late)
    with pytest.raises((DamagedMemoryError, ExportError), match="block-00002"):
        other.import_from(folder)
    assert other.records.items(PENDING) == [] == other.records.memory_ids() == other.records.lock_names()


@pytest.mark.parametrize("path", ["a\0b", "loop"])
def test_no_possible_folder_is_an_error_in_words(library: MemoryStore, tmp_path: Path, path: str) -> None:
    making.write(library)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ExportError, match="cannot be the path of a folder"):
        library.export(tmp_path / path)
