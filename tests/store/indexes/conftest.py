"""Memories of both kinds in a store that knows the backend ``kept``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kept
from tests.models import build, read
from tests.store.indexes.looking import KINDS


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)


@pytest.fixture(params=KINDS)
def memory(request, library):
    return read(library, build(request.param), length=300)


@pytest.fixture
def hidden(library):
    return read(library, build("bart"), length=300)
