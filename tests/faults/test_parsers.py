"""What is read from a file is parsed with an error of its own kind, and nothing is counted or made by it unchecked."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore import config
from memstore.catalog import SEALED, key
from memstore.errors import ConfigError, DamagedMemoryError, FormatError
from memstore.index_record import IndexRecord, _unpack
from memstore.manifest import Manifest
from memstore.slots import slots
from memstore.store import MemoryStore
from memstore_backends.lmdb_mend import COPY, mend, write_copy
from memstore_backends.lmdb_pages import PageError, scan
from memstore_backends.lmdb_snapshot import Snapshot
from memstore_backends.lmdb_summary import Summary
from tests.store import making

quickly = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SEAL = {"nbytes": 8192, "structure": "0" * 32}
RECORD: dict[str, Any] = {
    "backend": "hnsw", "distribution": "memstore", "version": "1", "created": 1.0, "seconds": 1.0, "digest": None,
    "options": {}, "folder": "0" * 32, "files": {"hidden": {"nbytes": 1, "checksum": "0" * 32}},
}  # fmt: skip


def changed(facts: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """These facts with some of them replaced by anything, left out, or added."""
    replaced = st.dictionaries(st.sampled_from([*facts, "another"]), values, max_size=3)
    left_out = st.sets(st.sampled_from(sorted(facts)), max_size=1)
    return st.builds(lambda new, old: {k: v for k, v in {**facts, **new}.items() if k not in old}, replaced, left_out)


@quickly
@given(
    data=st.binary(max_size=200)
    | values.map(msgpack.packb)
    | changed(making.manifest().model_dump()).map(msgpack.packb)
)
def test_a_manifest_is_read_or_refused(data: bytes) -> None:
    try:
        manifest = Manifest.unpack(data)
    except FormatError:
        return
    assert 0 < manifest.num_tokens < 2**31 and 0 < manifest.block_tokens < 2**31
    assert 0 <= manifest.vector_bytes < 2**400
    assert all(0 < size < 2**31 for part in manifest.parts.values() for size in part.shape)
    if manifest.kind in ("hidden", "kv"):
        with contextlib.suppress(FormatError):
            slots(manifest.model_copy(update={"kind": "kv"}))


@quickly
@given(data=st.binary(max_size=200) | values.map(msgpack.packb) | changed(RECORD).map(msgpack.packb))
def test_the_record_of_an_index_is_read_or_none(data: bytes) -> None:
    record = _unpack(data)
    if record is not None:
        assert {*record.folder, *"".join(record.files)} <= set("0123456789abcdefghijklmnopqrstuvwxyz.")
        assert not any(name.startswith(".") for name in record.files)


@pytest.mark.parametrize(
    "change", [{"folder": ".."}, {"folder": "/etc"}, {"files": {"../x": RECORD["files"]["hidden"]}}]
)
def test_the_record_of_an_index_leads_nowhere_else(change: dict[str, Any]) -> None:
    assert isinstance(_unpack(msgpack.packb(RECORD)), IndexRecord)
    assert _unpack(msgpack.packb({**RECORD, **change})) is None


def test_a_manifest_nested_too_deep_is_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    facts = making.manifest().model_dump()
    for packed in (b"\x91" * 100_000, msgpack.packb(facts)[:-1] + b"\x91" * 5000):
        with pytest.raises(FormatError):
            Manifest.unpack(packed)


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 2**31 - 1, "block_tokens": 1},
        {"num_tokens": 2**31 - 1},
        {"parts": {"large": {"shape": [2**20], "dtype": "float32"}}},
        {"parts": {"large": {"shape": [], "dtype": "float32"}}},
        {"prefix_ids": list(range(1000))},
        {"has_text": True, "num_tokens": 299},
    ],
    ids=str,
)
def test_sizes_that_a_manifest_makes_up_are_noticed_before_anything_is_made(
    library: MemoryStore, change: dict[str, Any]
) -> None:
    memory = making.write(library)
    raw = msgpack.packb({**memory.manifest.model_dump(), **change})
    library.records.commit({key(SEALED, "esther"): raw})
    crafted = library["esther"]
    assert library.names() == ["esther"]
    with pytest.raises(DamagedMemoryError, match="'esther'.*verify --repair"), crafted.open() as opened:
        for part in crafted.manifest.parts:
            opened.prefix(part)
            opened.mapped(part)
            opened.blocks(part)


@pytest.mark.parametrize("key_", ["token_ids", "offsets"])
def test_a_number_of_tokens_that_is_made_up_is_noticed_in_what_is_kept_of_each(library: MemoryStore, key_: str) -> None:
    memory = making.write(library)
    raw = msgpack.packb({**memory.manifest.model_dump(), "num_tokens": 299})
    library.records.commit({key(SEALED, "esther"): raw})
    with pytest.raises(DamagedMemoryError, match="'esther' is damaged: .* for 299 tokens"):
        getattr(library["esther"], key_)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**31 - 1] * 2},
        {"shape": [0]},
        {"shape": [-1]},
        {"shape": [1] * 9},
        {"every": 0},
        {"dtype": "object"},
    ],
    ids=str,
)
def test_a_part_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    facts = making.manifest().model_dump()
    facts["parts"]["large"] |= change
    with pytest.raises(FormatError, match=f"(?s)'esther' is not valid.*{next(iter(change))}.*Restore"):
        Manifest.unpack(msgpack.packb(facts))


def test_a_seal_that_says_nothing_is_refused(library: MemoryStore) -> None:
    memory = making.write(library)
    for seal in ({}, {"nbytes": -1}, {"nbytes": "8192"}):
        raw = msgpack.packb({**memory.manifest.model_dump(), "seal": seal})
        library.records.commit({key(SEALED, "esther"): raw})
        with pytest.raises(FormatError, match="seal"):
            library["esther"]
    raw = msgpack.packb({**memory.manifest.model_dump(), "seal": {"nbytes": SEAL["nbytes"]}})
    library.records.commit({key(SEALED, "esther"): raw})
    with pytest.raises(DamagedMemoryError):
        library["esther"].open()


@quickly
@given(
    text=st.text(max_size=60) | st.binary(max_size=60) | st.builds("[{}]\n{} = {}\n".format, *[st.text(max_size=8)] * 3)
)
def test_a_configuration_is_read_or_refused(tmp_path: Path, user_directory: Path, text: str | bytes) -> None:
    (tmp_path / "plugins.toml").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    try:
        loaded = config.load(tmp_path, {})
    except ConfigError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017  (either is right)
    else:
        assert loaded.settings.index.backend


@quickly
@given(table=changed({"path": "library", "records": "lmdb"}))
def test_variables_are_read_or_refused(user_directory: Path, table: dict[str, Any], tmp_path: Path) -> None:
    environ = {f"MEMSTORE__STORE__{name.upper()}": str(value) for name, value in table.items()}
    try:
        assert config.load(tmp_path, environ).settings.store.records
    except ConfigError as error:
        assert "MEMSTORE__STORE__" in str(error)  # noqa: PT017  (either is right)


@quickly
@given(data=st.binary(max_size=60) | values.map(msgpack.packb))
def test_a_summary_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(PageError):
        summary = Summary.unpack(data, 1)
        summary.check(Summary.of_keys([b"a"]), summary.kinds)


@quickly
@given(pages=st.binary(max_size=3 * 512), meta=st.booleans())
def test_bytes_that_are_no_pages_are_refused(tmp_path: Path, pages: bytes, meta: bool) -> None:
    file = tmp_path / "data.mdb"
    file.write_bytes(pages)
    fd = os.open(file, os.O_RDONLY)
    try:
        with pytest.raises(PageError):
            list(Snapshot(fd, 2).items(b"")) if meta else scan(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("records", [{1: b""}, {"text": None}, {b"m": [1]}, {}], ids=str)
def test_a_copy_that_is_none_restores_nothing(library: MemoryStore, records: Any) -> None:
    memory = making.write(library)
    folder = library.records.folder(memory.manifest.id)
    assert folder is not None
    library.close()
    (library.path / "catalog" / "data.mdb").write_bytes(b"")
    write_copy(folder, records)
    assert (folder / COPY).exists()
    (said,) = mend(library.path)
    assert "0 were restored" in said
