"""Fixtures of the tests of the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from memstore.store import MemoryStore


@pytest.fixture
def other(tmp_path: Path) -> Iterator[MemoryStore]:
    with memstore.open(tmp_path / "other") as store:
        yield store
