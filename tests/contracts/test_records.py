"""Every record backend keeps the contract."""

from __future__ import annotations

from memstore.testing import RecordStoreContract
from memstore_backends.in_memory import InMemoryRecords
from memstore_backends.lmdb_records import LmdbRecords


class TestInMemory(RecordStoreContract):
    records = InMemoryRecords


class TestLmdb(RecordStoreContract):
    records = LmdbRecords
