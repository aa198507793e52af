"""What could grow for ever: the catalog beside readers, killed ones too, and its map."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import memstore
from memstore.store import MemoryStore
from memstore_backends import lmdb_catalog
from memstore_backends.lmdb_records import LmdbRecords
from tests.store import making

READ = """
import os, signal, sys
from pathlib import Path
from memstore_backends.lmdb_catalog import Catalog
with Catalog.acquire(Path(sys.argv[1]), False)._transaction() as transaction:
    assert transaction.get(b"format")
    print("reading", flush=True)
    sys.stdin.readline()
"""
COUNT = """
import sys
from pathlib import Path
from memstore_backends import lmdb_catalog
from memstore_backends.lmdb_records import LmdbRecords
lmdb_catalog.CATALOG_MAP = 1 << 17
records = LmdbRecords(Path(sys.argv[1]), "a")
for line in sys.stdin:
    records.commit({b"m%d" % i: bytes(1000) for i in range(int(line), int(line) + 100)})
    print(len(records.items(b"m")), flush=True)
"""


def catalog_bytes(library: MemoryStore) -> int:
    return (library.path / "catalog" / "data.mdb").stat().st_size


def churn(library: MemoryStore, times: int) -> None:
    """Change the catalog so often that it would be many times as large if it gave no page back."""
    for i in range(times):
        library.records.commit({b"x": i.to_bytes(2, "big") * 2000})


def test_a_reader_that_was_killed_while_it_read_holds_nothing_back(library: MemoryStore) -> None:
    churn(library, 5)
    process = making.child(READ, library.path / "catalog", stdin=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    before = catalog_bytes(library)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    churn(library, 60)
    assert catalog_bytes(library) <= before + 4 * 4096  # of 60 × 4 kB that were written
    records = library.records
    assert isinstance(records, LmdbRecords) and records._catalog is not None
    assert records._catalog._opened().readers().count("\n") <= 2  # a title, and this process


def test_one_that_is_attached_holds_nothing_back(library: MemoryStore) -> None:
    with making.write(library).open() as opened:
        making.write(library, "other")
        del library["other"]
        churn(library, 5)
        before = sum(path.stat().st_size for path in library.path.rglob("*"))
        for _ in range(10):
            making.write(library, "other")
            del library["other"]
        churn(library, 50)
        assert sum(path.stat().st_size for path in library.path.rglob("*")) <= before + 4 * 4096
        assert opened.rows("large", 0, 300).shape == (300, 40)


def test_the_catalog_outgrows_its_map_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_catalog, "CATALOG_MAP", 1 << 17)  # 128 KiB
    with memstore.open(tmp_path / "library") as library:
        other = making.child(COUNT, library.path, stdin=-1)
        assert other.stdin is not None and other.stdout is not None
        for start in (0, 200, 400):
            other.stdin.write(f"{start}\n")
            other.stdin.flush()
            assert other.stdout.readline() == f"{start + 100}\n"
            assert len(library.records.items(b"m")) == start + 100
            library.records.commit({b"m%d" % i: bytes(1000) for i in range(start + 100, start + 200)})
        assert len(library.records.items(b"m")) == 600
        other.communicate()
    assert catalog_bytes(library) > 600_000
