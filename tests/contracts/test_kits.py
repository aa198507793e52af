"""The kits notice what is broken, and say what it is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests import nested

BROKEN = [import_module(f"tests.contracts.broken_{kind}") for kind in ("indexes", "records", "adapters")]
CASES = [(module, name) for module in BROKEN for name in vars(module) if name.startswith("Test")]


class OnlyWhatMustFail(nested.Recorder):
    """Runs of each class only the test that must fail, until it has said what it must."""

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [item for item in items if item.originalname == getattr(item.cls, "fails", None)]

    def pytest_runtest_setup(self, item: pytest.Function) -> None:
        if any(vars(item.cls)["says"] in failure for failure in self.failures(item.cls.__name__)):
            pytest.skip("what must be said was said")

    def failures(self, name: str) -> list[str]:
        """What the failures in a class said."""
        return [report.longreprtext for report in self.reports if report.failed and nested.class_of(report) == name]


@pytest.fixture(scope="module")
def recorders() -> dict[ModuleType, OnlyWhatMustFail]:
    """What happened, by module."""
    recorders = {module: OnlyWhatMustFail() for module in BROKEN}
    for module, recorder in recorders.items():
        recorder.run(Path(str(module.__file__)), "--no-header", "--no-summary")
    return recorders


@pytest.mark.parametrize(("module", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_promise_is_noticed_and_named(
    recorders: dict[ModuleType, OnlyWhatMustFail], module: ModuleType, name: str
) -> None:
    failures = recorders[module].failures(name)
    assert failures, "the kit noticed nothing"
    assert any(getattr(module, name).says in failure for failure in failures), failures[0][-1500:]
