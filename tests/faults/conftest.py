"""What the tests of faults share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> int:
    """How many times the faults of the test run are tried: ten with ``--full``."""
    return 10 if request.config.getoption("--full") else 1
