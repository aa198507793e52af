"""The kits notice what is broken, and say what it is."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from types import ModuleType

import pytest

BROKEN = [import_module(f"tests.contracts.broken_{kind}") for kind in ("indexes", "records", "adapters")]
CASES = [(module, name) for module in BROKEN for name in vars(module) if name.startswith("Test")]


class Recorder:
    """Lets pytest run of each class only the test that must fail, and keeps what the failures said."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.said: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [item for item in items if item.originalname == getattr(item.cls, "fails", None)]

    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        if any(vars(item.cls)["says"] in failure for failure in self.said[item.cls.__name__]):
            pytest.skip("what must be said was said")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            self.said[report.nodeid.split("::")[1]].append(report.longreprtext)


@pytest.fixture(scope="module")
def said() -> dict[ModuleType, dict[str, list[str]]]:
    """What the failures said, by module and class."""
    recorders = [Recorder(module) for module in BROKEN]
    for recorder in recorders:
        pytest.main(
            [str(recorder.module.__file__), "-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"],
            plugins=[recorder],
        )
    return {recorder.module: recorder.said for recorder in recorders}


@pytest.mark.parametrize(("module", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_promise_is_noticed_and_named(
    said: dict[ModuleType, dict[str, list[str]]], module: ModuleType, name: str
) -> None:
    failures = said[module][name]
    assert failures, "the kit noticed nothing"
    assert any(getattr(module, name).says in failure for failure in failures), failures[0][-1500:]
