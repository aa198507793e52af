"""What is imported is not trusted: damaged and forged exports."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore import exchange, exporting, importing
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    ExportError,
    FormatError,
    MemstoreError,
)
from memstore.manifest import LAST_SECOND, Manifest
from memstore.store import MemoryStore
from tests.store import making

FILES = ["manifest.json", "text.txt", "document.safetensors", "prefix.safetensors", "block-00000.safetensors"]


@pytest.mark.parametrize("name", [*FILES, "block-00004.safetensors"])
def test_every_damaged_byte_is_noticed(library: MemoryStore, other: MemoryStore, tmp_path: Path, name: str) -> None:
    """Flipped, cut, extended, zeroed and exchanged bytes: an error by name, or the very same memory; nothing else."""
    memory = making.write(library)
    (folder,) = library.export(tmp_path / "out")
    path, chance, noticed = folder / name, random.Random(name), 0
    whole = path.read_bytes()
    for case in range(15):
        damaged = bytearray(whole)
        at = chance.randrange(len(whole))
        if case % 5 == 0:
            damaged[at] ^= 1 << chance.randrange(8)
        elif case % 5 == 1:
            del damaged[at:]
        elif case % 5 == 2:
            damaged += bytes(chance.randrange(1, 99))
        elif case % 5 == 3:
            damaged[at : at + 64] = bytes(len(damaged[at : at + 64]))
        else:
            damaged[: chance.randrange(1, 24)] = chance.randbytes(chance.randrange(1, 24))
        path.write_bytes(damaged)
        try:
            (brought,) = other.import_from(tmp_path / "out")
        except (DamagedMemoryError, FormatError, ExportError) as error:
            told = str(error)
            noticed += str(folder) in told or "Export" in told
            assert other.names() == []
            continue
        assert making.facts(brought) == making.facts(memory) and making.contents(brought) == making.contents(memory)
        del other["esther"]
    assert noticed >= 8
    path.write_bytes(whole)
    making.check(other.import_from(tmp_path / "out")[0], "open")
    assert len(other.records.memory_ids()) == 1


def forge(folder: Path, **changes: Any) -> None:
    """Change the exported manifest, and make its checksum fit."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    raw["manifest"] |= changes
    path.write_text(json.dumps(raw | {"checksum": exchange.json_checksum(raw["manifest"])}))


LARGE = {"shape": [1 << 20], "dtype": "float32"}
FORGED: list[tuple[dict[str, Any], type[MemstoreError], str | None]] = [
    ({"num_tokens": 10**15}, FormatError, "less than"),
    ({"num_tokens": 10**8}, DamagedMemoryError, "its tensors have"),
    ({"num_tokens": 10**40}, MemstoreError, None),
    ({"block_tokens": 10**12, "num_tokens": 10**12}, FormatError, "less than"),
    ({"parts": {"large": {"shape": [2**62, 2**62], "dtype": "float32"}}}, FormatError, "less than"),
    ({"parts": {"large": {"shape": [-4, -10], "dtype": "float32"}}}, FormatError, "greater than 0"),
    ({"parts": {"../../x": {"shape": [40], "dtype": "float32"}}}, DamagedMemoryError, "prefix.safetensors is damaged"),
    ({"parts": {"\ud800": {"shape": [40], "dtype": "float32"}}}, MemstoreError, None),
    ({"parts": {"__metadata__": {"shape": [40], "dtype": "float32"}}}, DamagedMemoryError, None),
    ({"parts": {}}, DamagedMemoryError, None),
    ({"parts": {"large": LARGE}}, DamagedMemoryError, "its tensors have"),
    ({"name": ""}, DocumentError, "cannot be a name"),
    ({"name": "a\0b"}, DocumentError, "cannot be a name"),
    ({"name": "a\ud800"}, FormatError, "no manifest can"),
    ({"id": "0" * 32}, DamagedMemoryError, "manifest"),
    ({"seal": {"nbytes": 1}}, DamagedMemoryError, "manifest"),
    ({"digest": None}, DamagedMemoryError, "not what was exported"),
    ({"digest": "0" * 32}, DamagedMemoryError, "not what was exported"),
    ({"metadata": {"n": 2**70}}, FormatError, "no manifest can"),
    ({"unknown": 1}, FormatError, "not valid"),
    ({"unknown": 1, "format_minor": 99}, FormatError, "has format 1.99"),
    ({"format_major": 2}, FormatError, "has format 2"),
    ({"format_minor": "x", "unknown": 1}, FormatError, "not valid"),
    ({"has_ids": False}, MemstoreError, None),
    ({"has_text": False}, MemstoreError, None),
]


@pytest.mark.parametrize(("changes", "error", "message"), FORGED, ids=[ascii(list(f[0].items()))[:60] for f in FORGED])
def test_a_forged_manifest_is_refused(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, changes: Any, error: type[MemstoreError], message: Any
) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path / "out")
    forge(folder, **changes)
    with pytest.raises(error, match=message):
        other.import_from(tmp_path / "out")
    assert other.names() == [] and {path.name for path in tmp_path.iterdir()} == {"library", "other", "out"}


HEADS: list[tuple[Any, str]] = [
    ([], "is not the manifest"),
    ("{" * 5, "is not the manifest"),
    ("[" * 100_000, "is not the manifest"),
    ({"format": "memstore-export", "major": 2, "minor": 0}, "is not the manifest"),
    ({"major": 2}, "has format memstore-export 2.0; this version of memstore reads format memstore-export 1"),
    ({"format": "another"}, "has format another"),
]


@pytest.mark.parametrize(("head", "message"), HEADS, ids=range(len(HEADS)))
def test_what_is_no_export_of_this_format_is_refused(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, head: Any, message: str
) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path / "out")
    path = folder / "manifest.json"
    if isinstance(head, dict) and len(head) < 3:
        head = json.loads(path.read_text()) | head
    path.write_text(head if isinstance(head, str) else json.dumps(head))
    with pytest.raises(FormatError, match=message):
        other.import_from(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["missing", "a link out of the folder", "a folder", "a pipe"])
def test_a_file_that_is_none(library: MemoryStore, other: MemoryStore, tmp_path: Path, name: str, kind: str) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path / "out")
    path = folder / name
    path.rename(tmp_path / "moved")
    if kind == "a link out of the folder":
        path.symlink_to(tmp_path / "moved")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    with pytest.raises(ExportError):
        other.import_from(folder)
    assert other.names() == []


def test_files_larger_than_they_may_be_are_not_read(
    library: MemoryStore, other: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    (folder,) = library.export(tmp_path / "out")
    for name in FILES:
        path = folder / name
        whole = path.read_bytes()
        os.truncate(path, 1 << 40)  # a hole, which takes no space
        with pytest.raises((ExportError, DamagedMemoryError), match=str(1 << 40)):
            other.import_from(folder)
        path.write_bytes(whole)
    monkeypatch.setattr(exporting, "JSON_LIMIT", 100)
    with pytest.raises(ExportError, match="metadata of 'esther' is too large"):
        library.export(tmp_path / "more")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@given(
    metadata=st.dictionaries(st.text(), json_values, max_size=4), created=st.floats(0, LAST_SECOND, exclude_max=True)
)
def test_any_manifest_comes_back_as_the_same_bytes(draft_folder: Path, metadata: Any, created: float) -> None:
    manifest = making.manifest(metadata=metadata, created=created, digest="0" * 32, fingerprint=metadata)
    facts = manifest.model_dump(exclude=exchange.OWN)
    described = {"format": exchange.FORMAT, "major": 1, "minor": 0, "has_offsets": True}
    described |= {"checksum": exchange.json_checksum(facts), "manifest": facts}
    (draft_folder / "manifest.json").write_text(json.dumps(described))
    back, has_offsets = importing._manifest(draft_folder)
    assert has_offsets and back.model_copy(update={"id": manifest.id}).pack() == manifest.pack()


@given(raw=st.dictionaries(st.sampled_from([*Manifest.model_fields, "unknown"]), json_values, max_size=30))
def test_what_is_no_manifest_is_a_format_error(raw: dict[str, Any]) -> None:
    base = making.manifest().model_dump()
    for fields in (raw, base | raw):
        try:
            manifest = Manifest.checked(fields)
        except FormatError:
            continue
        assert Manifest.model_validate(manifest.model_dump()) == manifest
