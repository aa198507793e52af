"""A damaged catalog is made whole. Nothing here loads torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lmdb
import pytest

import memstore
from memstore.errors import (
    DamagedMemoryError,
    FormatError,
    StoreBusyError,
    StoreInUseError,
)
from memstore.repair import mend_catalog
from memstore.store import MemoryStore
from memstore_backends import lmdb_mend
from tests.faults.harming import (
    KilledError,
    catalog_of,
    change_a_manifest,
    cut,
    data_of,
    fill_with_zeros,
    forget_a_record,
    kill,
    lose,
    lose_the_folder,
)
from tests.store import making


@pytest.mark.parametrize("harm", [lose, lose_the_folder, fill_with_zeros, cut, forget_a_record, change_a_manifest])
def test_a_damaged_catalog_is_made_whole_from_copies(library: MemoryStore, harm: Any) -> None:
    for name in ("esther", "gone", "ruth"):
        making.write(library, name)
    before = {name: library[name].manifest for name in ("esther", "ruth")}
    values = {name: making.contents(library[name]) for name in before}
    del library["gone"]
    library.close()
    harm(catalog_of(library))
    with (
        pytest.raises((DamagedMemoryError, FormatError), match="verify --repair"),
        memstore.open(library.path) as store,
    ):
        store.names()
    (done,) = mend_catalog(library.path, "lmdb")
    assert "restored from copies" in done
    assert mend_catalog(library.path, "lmdb") == []
    with memstore.open(library.path) as store:
        assert store.names() == ["esther", "ruth"]
        for name, manifest in before.items():
            assert store[name].manifest == manifest
            assert making.contents(store[name]) == values[name]
        making.write(store, "job")
    kept = list(catalog_of(library).parent.glob("damaged-*.mdb"))
    assert len(kept) == (harm not in (lose, lose_the_folder)) == ("is kept as" in done)


def test_a_catalog_that_another_process_was_just_writing_is_not_replaced(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    readable = lmdb_mend._readable

    def torn(data: Path) -> Any:
        monkeypatch.setattr(lmdb_mend, "_readable", readable)
        before = readable(data)
        with memstore.open(library.path) as store:
            making.write(store, "ruth")
        return before[0], "a page was being written", False

    monkeypatch.setattr(lmdb_mend, "_readable", torn)
    assert mend_catalog(library.path, "lmdb") == []
    with memstore.open(library.path) as store:
        assert store.names() == ["esther", "ruth"]


def test_what_is_no_copy_is_passed_over(library: MemoryStore) -> None:
    records = [making.write(library, name) for name in ("esther", "ruth", "tobit")]
    copies = [data_of(memory).with_name("record") for memory in records]
    for copy in copies[:2]:
        copy.unlink()
    copies[0].mkdir()
    os.mkfifo(copies[1])  # which nobody writes to
    results = {result.name: result for result in library.verify(repair=True)}
    assert all(result.ok for result in results.values())
    assert "The copy of its record was not renewed" in results["esther"].unrepaired[0] and copies[1].is_file()
    copies[1].unlink()
    os.mkfifo(copies[1])
    library.close()
    lose(library.path / "catalog" / "data.mdb")
    (done,) = mend_catalog(library.path, "lmdb")
    assert "1 were restored" in done
    with memstore.open(library.path) as store:
        assert store.names() == ["tobit"]


def test_nothing_is_mended_where_there_is_no_store(tmp_path: Path) -> None:
    assert mend_catalog(tmp_path / "missing", "lmdb") == [] == mend_catalog(tmp_path, "lmdb")
    assert list(tmp_path.iterdir()) == []


def test_a_catalog_is_not_mended_while_it_is_in_use(library: MemoryStore) -> None:
    making.write(library)
    with pytest.raises(StoreInUseError):
        mend_catalog(library.path, "lmdb")
    library.close()
    holder = making.child(
        "import sys, memstore\nstore = memstore.open(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()",
        library.path,
        stdin=-1,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "open\n"
    forget = catalog_of(library).read_bytes()
    fill_with_zeros(catalog_of(library))
    try:
        with pytest.raises(StoreBusyError, match="End all"):
            mend_catalog(library.path, "lmdb")
        assert not any(catalog_of(library).read_bytes())
    finally:
        holder.communicate()
    catalog_of(library).write_bytes(forget)
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"]


def test_who_opens_a_store_while_it_is_mended_waits_for_it(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """liblmdb finds no lock file that it knows where the one that mends has just forgotten it."""
    making.write(library)
    library.close()
    tried, opened = [], lmdb.open

    def late(*arguments: Any, **options: Any) -> Any:
        tried.append(options["lock"])
        if len(tried) == 1:
            raise lmdb.InvalidError("MDB_INVALID: File is not an LMDB file")
        return opened(*arguments, **options)

    monkeypatch.setattr(lmdb, "open", late)
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"] and tried[:2] == [True, True]


@pytest.mark.parametrize("step", ["the old file is kept", "all is done"])
def test_what_a_killed_mending_left_goes_when_the_store_is_opened(
    library: MemoryStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    cut(catalog_of(library))
    left = library.path / "catalog" / "new"
    tidy = lmdb_mend.tidy
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        if step == "all is done":
            patched.setattr(lmdb_mend, "tidy", lambda folder: kill() if left.exists() else tidy(folder))
        else:
            patched.setattr(lmdb_mend, "_keep", kill)
        lmdb_mend.mend(library.path)
    assert left.is_dir()
    mend_catalog(library.path, "lmdb")
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"] and not left.exists()


def test_a_catalog_that_is_whole_once_it_is_alone_is_left(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    before = catalog_of(library).read_bytes()

    def seen(data: Path) -> Any:
        first.append(data)
        return ({}, "another process was writing", False) if len(first) == 1 else readable(data)

    first: list[Path] = []
    readable = lmdb_mend._readable
    monkeypatch.setattr(lmdb_mend, "_readable", seen)
    assert mend_catalog(library.path, "lmdb") == []
    assert len(first) == 2
    assert catalog_of(library).read_bytes() == before


def test_who_waited_to_open_a_catalog_does_not_go_by_the_lock_file_of_the_one_before(library: MemoryStore) -> None:
    making.write(library)
    library.close()
    lose(catalog_of(library))
    lmdb_mend.mend(library.path)
    assert not any((library.path / "catalog" / "lock.mdb").read_bytes()[:20])
    assert mend_catalog(library.path, "lmdb") == ["The catalog had lost its format record, which was written anew."]
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"]
