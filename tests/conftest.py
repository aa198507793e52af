"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import memstore
from memstore.store import MemoryStore

# Before torch is imported, and for child processes too: the models are tiny, and threads that wait for each other
# cost ten times what they save once another process is at work.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[MemoryStore]:
    """An empty store."""
    with memstore.open(tmp_path / "library") as store:
        yield store
