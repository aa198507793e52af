"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.server import Server


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> int:
    """How many times the faults of the test run are tried: ten with ``--full``."""
    return 10 if request.config.getoption("--full") else 1


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that forks children which can be killed: see server.py."""
    server = Server(tmp_path_factory.mktemp("faults"))
    yield server
    server.close()
