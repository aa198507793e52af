"""A tiny model, a folder of documents, and a store in which they were indexed by the command line itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memstore.cli import app
from tests import tiny

GENESIS = "In the beginning there was a café.\r\nAnd it was good.\r\n" * 30

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """Run a command in this process; gives exit_code, stdout, stderr."""

    def run(*arguments: object, stdin: bytes | None = None) -> Any:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents, one of them below, and things that are no documents."""
    folder = tmp_path / "documents"
    (folder / "letters").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "genesis.txt").write_bytes(GENESIS.encode())
    (folder / "letters" / "first.md").write_text("Dear [b]Ruth[/b], 你好 🙂", encoding="utf-8")
    (folder / ".hidden" / "no.txt").write_text("no")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture(scope="session")
def _library(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    documents = tmp_path_factory.mktemp("books")
    (documents / "genesis.txt").write_bytes(GENESIS.encode())
    (documents / "ruth[1].txt").write_text("And Ruth said, whither thou goest, I will go.")
    store = tmp_path_factory.mktemp("stores") / "library"
    result = CliRunner().invoke(app, ["index", str(documents), "--model", str(model), "--store", str(store)])
    assert result.exit_code == 0, result.output
    return store


@pytest.fixture
def library(_library: Path, tmp_path: Path) -> Path:
    """A store that holds ``genesis`` and ``ruth[1]``, to do with as a test likes."""
    return Path(shutil.copytree(_library, tmp_path / "library"))
