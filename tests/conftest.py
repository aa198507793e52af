"""What all tests share."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import memstore
from memstore import config
from memstore.store import MemoryStore

# Before torch is imported, and for child processes too: the models are tiny, and threads that wait for each other
# cost ten times what they save once another process is at work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

Distribution = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="Try ten times as many faults (tests/faults).")


@pytest.fixture
def library(tmp_path: Path) -> Iterator[MemoryStore]:
    """An empty store."""
    with memstore.open(tmp_path / "library") as store:
        yield store


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch with one thread, for what must come out the same to the last bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Knows of each call of the fused kernel by which a decoder-only model reads."""
    from memstore import attention
    from memstore.reading import joint

    kernel = Mock(wraps=attention.fused_attention)
    monkeypatch.setattr(joint, "fused_attention", kernel)
    return kernel


@pytest.fixture
def user_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user configuration directory, so that a test does not read the developer's own."""
    directory = tmp_path_factory.mktemp("user")
    monkeypatch.setattr(config, "user_config_path", lambda _: directory)
    return directory


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distribution]:
    """Install a distribution with plugins and modules, ``package.module`` too; it is gone after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, group: str, plugins: dict[str, str], modules: dict[str, str] | None = None) -> None:
        info = tmp_path / f"{name}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in plugins.items()))
        for module, source in (modules or {}).items():
            file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(source)
            installed.add(module.partition(".")[0])
        importlib.invalidate_caches()

    installed: set[str] = set()
    yield install
    for module in [name for name in sys.modules if name.partition(".")[0] in installed]:
        del sys.modules[module]
