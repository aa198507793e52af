"""Running an operation (operations.py) with faults, and what must hold after each of them."""

from __future__ import annotations

import errno
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults.operations import DOCUMENTS, Operation
from tests.faults.server import Child, Server

if TYPE_CHECKING:  # which imports torch, as only the server need
    from tests.faults.children import State


class Trial:
    """An operation, the store it finds and the one it leaves when nothing happens to it.

    documents: for each folder that commands name, the texts in it.
    """

    def __init__(
        self, server: Server, operation: Operation, folder: Path, documents: Mapping[str, Mapping[str, str]] = DOCUMENTS
    ) -> None:
        self.server, self.operation, self.folder = server, operation, folder
        self._places = {name: folder / name for name in documents}
        self._base = folder / "base"
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True)
        for name, texts in documents.items():
            (folder / name).mkdir()
            for document, text in texts.items():
                (folder / name / f"{document}.txt").write_text(text)
        for command in operation.setup:
            done = self.attempt(self._base, command=command).result()
            assert done["code"] == 0, command
        for path, new in operation.edits.items():
            (folder / path).unlink() if new is None else (folder / path).write_text(new)
        child = self.attempt(self.fresh())
        done = child.result()
        assert done["code"] == 0, child.errors
        self.before, self.after = child.told[0]["memories"], done["state"]["memories"]
        assert self.before != self.after
        assert done["state"]["pending"] == done["state"]["left"] == []
        self.calls, self.seconds = done["calls"], done["seconds"]

    def fresh(self) -> Path:
        """A copy of the store as it is before the operation."""
        store = self.folder / "store"
        shutil.rmtree(store, ignore_errors=True)
        if self._base.exists():
            shutil.copytree(self._base, store)
        return store

    def attempt(self, store: Path, command: str | None = None, **fault: Any) -> Child:
        """Start the operation in a child: see :func:`tests.faults.children.attempt`."""
        line = (command or self.operation.command).format(store=store, scratch=self._scratch, **self._places)
        return self.server.start("attempt", command=line, store=str(store), **fault)

    def finished(self, store: Path, reported: list[str]) -> None:
        """Repeat the command, which must leave the store as if nothing had happened."""
        child = self.attempt(store)
        done = child.result()
        self.check(child.told[0], reported)
        if child.told[0]["memories"] == self.before:  # else it may complain of what is done already
            assert done["code"] == 0, child.errors
        assert done["state"]["left"] == [], f"left behind: {done['state']['left']}"
        assert done["state"] == {"memories": self.after, "pending": [], "left": []}

    def check(self, found: State, reported: list[str]) -> None:
        """Every memory is as it was or as it is to be, and as it is to be where that was reported."""
        for name in {*found["memories"], *self.before, *self.after}:
            allowed = [self.after.get(name)] if name in reported else [self.before.get(name), self.after.get(name)]
            assert found["memories"].get(name) in allowed, f"{name} is neither as it was nor as it is to be"

    def kill(self, *faults: dict[str, Any]) -> int:
        """Kill it at each of these, one after the other, and let it finish. Returns how often it was killed."""
        store, kills = self.fresh(), 0
        reported: list[str] = []
        for fault in faults:
            child = self.attempt(store, **fault)
            status = child.wait()
            assert status in (0, -signal.SIGKILL), f"{status}, {child.errors}"
            self.check(child.told[0], reported)
            reported += self.operation.reported(child.output)
            kills += status != 0
        self.finished(store, reported)
        return kills

    def fill(self, strike: int) -> bool:
        """Let the disk be full from this call on, and make space again. Whether it noticed."""
        store = self.fresh()
        child = self.attempt(store, strike=strike, error=errno.ENOSPC)
        done = child.result()
        reported = self.operation.reported(child.output)
        self.check(done["state"], reported)
        if done["code"]:
            assert "full" in child.errors, child.errors
        else:
            assert done["state"]["memories"] == self.after
        self.finished(store, reported)
        return bool(done["code"])
