"""What is built and installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import memstore

ROOT = Path(__file__).parents[1]
TESTED = ("demo", "faiss", "hnsw")  # extras
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = directory.iterdir()
    assert file.name == f"memstore_attention-{memstore.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(file)


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    info = f"memstore_attention-{memstore.__version__}.dist-info"
    packages = {"memstore", "memstore_adapters", "memstore_backends"}
    assert {name.split("/")[0] for name in names} == {*packages, info}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert {"memstore/defaults.toml", f"{info}/licenses/LICENSE"} <= set(names)
    assert not any(name.endswith((".pyc", ".lmdb")) for name in names)


def test_the_wheel_declares_what_the_project_declares(wheel: zipfile.ZipFile) -> None:
    info = f"memstore_attention-{memstore.__version__}.dist-info"
    entry_points = ConfigParser()
    entry_points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert entry_points["console_scripts"]["memstore"] == "memstore.cli:main"
    for group, plugins in PROJECT["entry-points"].items():
        assert dict(entry_points[group]) == plugins
        for value in plugins.values():
            assert value.partition(":")[0].replace(".", "/") + ".py" in wheel.namelist()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: <3.14,>=3.11\n" in metadata


def test_the_wheel_works_where_the_repository_is_not(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import memstore.config as c; print(c.__file__, c.load().settings.index.backend)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "memstore" / "config" / "__init__.py"), "exact"]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_pin_exactly_and_name_no_local_build(file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert {"torch", "transformers"} <= {line.partition("==")[0] for line in lines}
    for line in lines:
        assert "==" in line, line
        assert "+" not in line, line


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_requirement_is_pinned_and_its_range_is_open() -> None:
    pinned = pins("constraints.txt")
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *(each for name in (*TESTED, "dev") for each in extras[name])]:
        if requirement.startswith("memstore-attention["):
            continue
        name, at_least, version = requirement.partition(">=")
        assert at_least, requirement
        assert not {",", "<", "!", "="} & set(version), requirement
        assert name in pinned


def test_whatever_a_pinned_package_needs_is_pinned_too() -> None:
    """Of those that are installed as they are pinned: all, unless these are the oldest."""
    pinned = {canonicalize_name(name): version for name, version in pins("constraints.txt").items()}
    checked, waiting = set[tuple[str, str]](), {(name, "") for name in pinned}
    while waiting:
        name, extra = waiting.pop()
        checked.add((name, extra))
        try:
            if Version(metadata.version(name)).public != pinned[name]:
                continue
        except metadata.PackageNotFoundError:  # another platform's
            continue
        for needed in map(Requirement, metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                assert canonicalize_name(needed.name) in pinned, f"{name} needs {needed}"
                waiting |= {(canonicalize_name(needed.name), each) for each in needed.extras} - checked
    assert len(checked) >= len(pinned)


def test_what_is_declared_as_oldest_is_what_is_tested_as_oldest() -> None:
    pinned = pins("constraints-oldest.txt")
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *(each for name in TESTED for each in extras[name])]:
        name, _, version = requirement.partition(">=")
        if name != "torch":  # constraints-oldest.txt says why
            assert f"{pinned[name]}.".startswith(f"{version}."), requirement
