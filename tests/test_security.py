"""What the library never does, found in its own source: run what a store or a model brings, or talk unasked."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.store import MemoryStore
from tests.store import making

ROOT = Path(__file__).parents[1]
FOLDERS = ("memstore", "adapters/memstore_adapters", "backends/memstore_backends")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# What runs what it reads. The kits of memstore.testing start processes of their own, and pickle what they send to them.
EXECUTING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "code"}
OWN_PROCESSES = "memstore/testing/processes.py"
CALLS = {"eval", "exec", "compile", "__import__"}
SPEAKING = ("memstore/cli/", "memstore/demo.py", "memstore/assets.py")  # programs of their own


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def modules(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_unpickled_or_executed(path: Path) -> None:
    for node in nodes(path):
        if name_of(path) != OWN_PROCESSES:
            assert not modules(node) & EXECUTING
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS
        if isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            assert (owner, node.func.attr) not in {("torch", "load"), ("os", "system"), ("np", "load")}
        for keyword in node.keywords:
            assert keyword.arg not in {"trust_remote_code", "allow_pickle", "weights_only"}
            assert keyword.arg != "shell" or getattr(keyword.value, "value", None) is False


def test_remote_code_is_named_nowhere() -> None:
    assert [name_of(path) for path in SOURCES if "trust_remote_code" in path.read_text(encoding="utf-8")] == []
    assert len(SOURCES) > 100


@pytest.mark.parametrize("path", [path for path in SOURCES if not name_of(path).startswith(SPEAKING)], ids=name_of)
def test_the_library_prints_nothing(path: Path) -> None:
    for node in nodes(path):
        assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.stderr")


def test_the_library_logs_to_nobody_who_has_not_asked() -> None:
    import memstore  # noqa: F401

    handlers = logging.getLogger("memstore").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
    assert all(
        ast.unparse(node.func) != "logging.basicConfig" for path in SOURCES for node in nodes(path)
        if isinstance(node, ast.Call)
    )  # fmt: skip


def test_a_process_of_ours_runs_nothing_that_lies_in_the_current_folder(
    library: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script in a folder that came with a store might."""
    making.write(library)
    for module in ("json", "xxhash", "memstore"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('this was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as in the command itself
    assert [result.ok for result in library.verify()] == [True]
