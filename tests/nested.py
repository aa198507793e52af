"""pytest inside of a test."""

from __future__ import annotations

from pathlib import Path

import pytest


class Recorder:
    """A pytest plugin that keeps the reports of the tests that were called."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.reports.append(report)

    def run(self, file: Path, *arguments: str) -> int:
        """Run the tests of a file in this process; returns the exit status."""
        return int(pytest.main([str(file), "-q", "-p", "no:cacheprovider", *arguments], plugins=[self]))


def class_of(report: pytest.TestReport) -> str:
    """The name of the class in which the test stands."""
    return report.nodeid.split("::")[1]
