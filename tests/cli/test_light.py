"""The commands that need no model load neither torch nor transformers, in their child processes either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memstore
from memstore.memory import Document

COMMAND = "from memstore.cli import main; main()"
DRAFT = {"id": "0" * 32, "name": "né", "seal": None, "digest": None, "has_text": False, "has_ids": False}


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["show", "genesis"],
        ["verify"],
        ["remove", "genesis"],
        ["export", "genesis", "out"],
        ["import", "exported"],
        ["plugins"],
        ["config", "show"],
    ],
)
def test_a_command_works_where_torch_cannot_be_imported(library: Path, tmp_path: Path, arguments: list[str]) -> None:
    with memstore.open(library, "r") as store:
        store.export(tmp_path / "exported")
    for package in ("torch", "transformers"):
        (tmp_path / f"{package}.py").write_text(f"raise SystemExit('{package} was imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "MEMSTORE__STORE__PATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "memstore", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["memstore", memstore.__version__]


def test_importing_memstore_loads_no_model_library() -> None:
    code = "import sys, memstore, memstore.cli, memstore.models; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_characters_that_the_terminal_lacks_do_not_cost_the_output(library: Path) -> None:
    with memstore.open(library) as store:
        store.create(store["genesis"].manifest.model_copy(update=DRAFT), Document()).close()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "remove", "né", "--store", str(library)], env=environment, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, rb"Removed n\xe9." + os.linesep.encode())
