"""Stores of every version of the format, written once by ``make_golden.py``, are read as they were written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import msgpack
import numpy as np
import pytest

import memstore
from memstore.catalog import FORMAT, SEALED, key
from memstore.errors import FormatError
from memstore.interfaces import Mode
from memstore.manifest import FORMAT_MAJOR, FORMAT_MINOR
from tests.store import make_golden as golden

STORES = sorted((Path(__file__).parent / "golden").glob("*.zip"))


def unpacked(stored: Path, folder: Path) -> Path:
    with zipfile.ZipFile(io.BytesIO(stored.read_bytes())) as packed:
        packed.extractall(folder)
    return folder


def test_there_is_a_store_of_every_version() -> None:
    assert [path.stem for path in STORES] == [f"{FORMAT_MAJOR}.{minor}" for minor in range(FORMAT_MINOR + 1)]
    assert all(path.stat().st_size < 8192 for path in STORES)


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("stored", STORES, ids=lambda path: path.stem)
def test_a_store_of_an_older_version_is_read(stored: Path, mode: Mode, tmp_path: Path) -> None:
    minor = int(stored.stem.partition(".")[2])
    with memstore.open(unpacked(stored, tmp_path / "store"), mode) as store:
        assert store.names() == ["Wort"] and store.verify()[0].ok
        memory = store["Wort"]
        assert memory.manifest.format_minor == minor and memory.manifest.id == f"{minor:032x}"
        assert memory.text == golden.TEXT and memory.metadata == {"author": "unknown", "year": 90}
        assert memory.manifest.parts == golden.parts(minor) and memory.manifest.rule == golden.rule(minor)
        assert memory.passage(3, 9) == golden.TEXT[3:9].strip()
        np.testing.assert_array_equal(memory.token_ids, np.arange(golden.TOKENS))
        np.testing.assert_array_equal(memory.offsets, golden.offsets())
        with memory.open("open") as opened:
            rows = opened.rows("hidden", 0, golden.TOKENS)
            np.testing.assert_array_equal(rows.numpy(), golden.hidden(0, golden.TOKENS))
            np.testing.assert_array_equal(opened.prefix("hidden").numpy(), golden.hidden(0, 2))
            if minor >= 1:
                coded = opened.rows("coded", 0, golden.TOKENS).numpy()
                np.testing.assert_array_equal(coded, golden.SCALE * golden.codes(0, golden.TOKENS))
                assert opened.prefix("coded").flatten().tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("stored", STORES, ids=lambda path: path.stem)
def test_a_store_of_an_older_version_goes_through_an_export(stored: Path, tmp_path: Path) -> None:
    with memstore.open(unpacked(stored, tmp_path / "store"), "r") as store:
        store.export(tmp_path / "out")
        with memstore.open(tmp_path / "other") as other:
            (brought,) = other.import_from(tmp_path / "out")
            assert brought.manifest.digest == store["Wort"].manifest.digest
            assert brought.manifest.format_minor == store["Wort"].manifest.format_minor


@pytest.mark.parametrize("change", [{"minor": FORMAT_MINOR + 7}, {"major": FORMAT_MAJOR + 1}])
def test_a_newer_minor_version_is_read_and_another_major_one_is_not(tmp_path: Path, change: dict[str, int]) -> None:
    path = unpacked(STORES[-1], tmp_path / "store")
    with memstore.open(path) as store:
        store.records.commit({FORMAT: msgpack.packb({"format": "memstore", "major": 1, "minor": 0} | change)})
        manifest = store["Wort"].manifest.model_copy(update={f"format_{part}": n for part, n in change.items()})
        store.records.commit({key(SEALED, "Wort"): manifest.pack()})
        if "major" in change:
            with pytest.raises(FormatError, match=f"has format {FORMAT_MAJOR + 1}"):
                store["Wort"]
    if "major" in change:
        with pytest.raises(FormatError, match=f"has format memstore {FORMAT_MAJOR + 1}.0; .* reads format 1"):
            memstore.open(path, "r")
        return
    with memstore.open(path, "r") as store, store["Wort"].open("open") as opened:
        assert opened.manifest.format_minor == FORMAT_MINOR + 7
        np.testing.assert_array_equal(opened.rows("hidden", 0, 9).numpy(), golden.hidden(0, 9))
