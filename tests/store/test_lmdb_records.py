"""What the LMDB backend promises to the store: see memstore.interfaces.RecordStore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.errors import DamagedMemoryError, FormatError, StoreError, StoreFullError, StoreInUseError
from memstore_backends.lmdb_records import LmdbRecords

ID = "0123456789abcdef" * 2


@pytest.fixture
def records(tmp_path: Path) -> Iterator[LmdbRecords]:
    opened = LmdbRecords(tmp_path / "store", "a")
    yield opened
    opened.close()


def test_the_catalog_changes_only_as_expected(records: LmdbRecords) -> None:
    assert records.commit({b"a": b"1", b"b": b""})
    assert not records.commit({b"a": b"2", b"c": b"3"}, [b"b"], {b"a": b"0"})
    assert not records.commit({b"a": b"2"}, expect={b"a": b"1", b"c": b"0"})
    assert records.items(b"") == [(b"a", b"1"), (b"b", b"")]
    assert records.commit({b"a": b"2"}, [b"b", b"missing"], {b"a": b"1", b"c": None})
    assert records.items(b"") == [(b"a", b"2")]
    assert records.get(b"b") is None


def test_items_are_those_of_a_prefix_in_order(records: LmdbRecords) -> None:
    records.commit({b"m2": b"y", b"m1": b"x", b"n": b"z", b"m": b"w"})
    assert records.items(b"m") == [(b"m", b"w"), (b"m1", b"x"), (b"m2", b"y")]
    assert records.items(b"o") == []


def test_many_threads_and_processes_change_the_catalog_without_losing_a_step(records: LmdbRecords) -> None:
    from tests.store import making

    code = """
import sys, threading
from pathlib import Path
from memstore_backends.lmdb_records import LmdbRecords
records = LmdbRecords(Path(sys.argv[1]), "a")
def count():
    for _ in range(40):
        while True:
            value = records.get(b"n")
            if records.commit({b"n": b"%d" % (int(value) + 1)}, expect={b"n": value}):
                break
threads = [threading.Thread(target=count) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    records.commit({b"n": b"0"})
    processes = [making.child(code, records.path) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert records.get(b"n") == b"360"
    assert lmdb.verify.verify(str(records.path / "catalog")) == []  # type: ignore[no-untyped-call]


def test_threads_may_share_a_catalog(records: LmdbRecords) -> None:
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for j in range(50):
                records.commit({b"%d" % i: b"%d" % j})
                assert records.get(b"%d" % i) == b"%d" % j
                assert len(records.items(b"")) >= 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


values = st.dictionaries(
    st.binary(min_size=1, max_size=511), st.binary(max_size=300) | st.integers(1, 20000).map(bytes), max_size=40
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(values, max_size=4))
def test_sealed_records_read_as_written_and_as_lmdb_reads_them(
    records: LmdbRecords, steps: list[dict[bytes, bytes]]
) -> None:
    written: dict[bytes, bytes] = {}
    writer = records.writer(ID, 1 << 20)
    for step in steps:
        writer.put(step)
        written |= step
        assert list(writer.keys()) == sorted(written)
        assert all(writer.get(key) == value for key, value in written.items())
    seal = writer.seal()
    reader = records.reader(ID, seal)
    assert list(reader.keys()) == sorted(written)
    for key, value in written.items():
        view = reader.get(key)
        assert view == value
        assert view.readonly
    reader.close()
    data = records.path / "memories" / ID / "data.mdb"
    assert seal["nbytes"] == data.stat().st_size
    assert lmdb.verify.verify(str(data)) == []  # type: ignore[no-untyped-call]
    with lmdb.open(str(data.parent), readonly=True, lock=False) as environment, environment.begin() as transaction:
        assert dict(transaction.cursor()) == written
    records.delete(ID)
    assert records.memory_ids() == []


def test_values_are_aligned_and_views_outlive_the_reader(records: LmdbRecords) -> None:
    sizes = [0, 1, 15, 500, 1999, 2000, 2048, 4080, 4081, 100_000]
    writer = records.writer(ID, 1 << 20)
    writer.put({b"%d" % size: bytes(range(256)) * (size // 256) + bytes(size % 256) for size in sizes})
    reader = records.reader(ID, writer.seal())
    views = {size: reader.get(b"%d" % size) for size in sizes}
    for size, view in views.items():
        assert len(view) == size
        if size:
            assert np.frombuffer(view, np.uint8).ctypes.data % 16 == 0
    with pytest.raises(DamagedMemoryError, match="lacks"):
        reader.get(b"missing")
    with pytest.raises(StoreInUseError):
        records.close()
    reader.close()
    reader.close()
    with pytest.raises(StoreError, match="no longer open"):
        reader.get(b"15")
    records.delete(ID)
    records.close()
    assert all(view[size // 256 * 256 :] == bytes(size % 256) for size, view in views.items())


def test_a_reader_that_was_forgotten_does_not_keep_the_store_open(records: LmdbRecords) -> None:
    writer = records.writer(ID, 1 << 20)
    writer.put({b"a": b"1"})
    seal = writer.seal()
    del writer
    records.reader(ID, seal)
    records.close()


def test_what_was_put_survives_the_writer(records: LmdbRecords) -> None:
    writer = records.writer(ID, 1 << 20)
    writer.put({b"a": bytes(5000)})
    writer.put({b"b": b"2"})
    writer.close()
    with pytest.raises(StoreError, match="no longer open"):
        writer.put({b"c": b"3"})
    again = records.writer(ID, 1 << 20)
    assert (list(again.keys()), again.get(b"b"), again.get(b"c")) == ([b"a", b"b"], b"2", None)
    again.close()
    assert records.memory_ids() == [ID]


def test_a_capacity_that_is_exceeded_says_so(records: LmdbRecords) -> None:
    writer = records.writer(ID, 1000)
    with pytest.raises(StoreFullError, match="size it was opened for"):
        writer.put({b"%d" % i: bytes(20 << 20) for i in range(4)})
    writer.put({b"a": b"1"})
    writer.close()


@pytest.mark.parametrize("size", [2000, 2025, 4080, 8192])
def test_the_map_is_large_enough_for_values_of_any_size(records: LmdbRecords, size: int) -> None:
    count = (200 << 20) // size // 8
    writer = records.writer(ID, count * size)
    writer.put({b"%08d" % i: bytes(size) for i in range(count)})
    assert writer.seal()["nbytes"] < 2.1 * count * size
    records.delete(ID)


def test_a_file_of_another_lmdb_is_refused(records: LmdbRecords) -> None:
    folder = records.path / "memories" / ID
    try:
        environment = lmdb.open(str(folder), lib_version=1)
    except lmdb.Error as error:
        pytest.skip(f"this lmdb writes no other format: {error}")
    with environment.begin(write=True) as transaction:
        transaction.put(b"a", b"1")
    environment.close()
    seal: dict[str, Any] = {"nbytes": (folder / "data.mdb").stat().st_size, "structure": ""}
    with pytest.raises(DamagedMemoryError, match="LMDB 0.9|page size"):
        records.reader(ID, seal)
    with pytest.raises(FormatError, match="LMDB 0.9"):
        records.writer(ID, 1)


def test_a_catalog_of_another_lmdb_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "catalog"
    folder.mkdir(parents=True)
    try:
        lmdb.open(str(folder), lib_version=1).close()
    except lmdb.Error as error:
        pytest.skip(f"this lmdb writes no other format: {error}")
    with pytest.raises(FormatError, match="LMDB 0.9"):
        LmdbRecords(tmp_path / "store", "a")


def test_records_are_shared_by_a_link_to_the_same_folder(records: LmdbRecords, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(records.path)
    another = LmdbRecords(tmp_path / "link", "a")
    another.commit({b"a": b"1"})
    assert records.get(b"a") == b"1"
    another.close()
    assert records.get(b"a") == b"1"
