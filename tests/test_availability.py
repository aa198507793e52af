"""Kind and availability of plugins, against what an import of them shows."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from memstore import registry
from memstore.availability import InstalledPlugin, installed
from memstore.errors import PluginError
from memstore.interfaces import RecordStore, VectorIndex
from tests.conftest import Distribution

INDEX = "from memstore.interfaces import VectorIndex\nclass Plugin(VectorIndex): ...\n"


def find(name: str) -> InstalledPlugin:
    (found,) = (plugin for plugin in installed(registry.BACKENDS) if plugin.name == name)
    return found


@pytest.fixture
def plugin(distribution: Distribution) -> Any:
    """Install ``third_plugin:Plugin [faiss]`` with these modules and examine it."""

    def install(modules: dict[str, str] | str, value: str = "third_plugin:Plugin") -> InstalledPlugin:
        if isinstance(modules, str):
            modules = {"third_plugin": modules}
        distribution("third", registry.BACKENDS, {"plugin": value}, modules)
        return find("plugin")

    return install


def test_the_built_in_plugins_are_what_they_are_when_they_are_loaded() -> None:
    bases = {VectorIndex: "index", RecordStore: "records"}
    for found in installed():
        if found.distribution != "memstore-attention":
            continue
        try:
            loaded = registry.load(found.group, found.name)
        except PluginError:
            assert found.available is False
            continue
        kinds = [kind for base, kind in bases.items() if issubclass(loaded, base)]
        assert found.kind == (kinds[0] if kinds else "adapter")
        assert (found.available, found.missing, found.install) == (True, (), None)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (INDEX, "index"),
        ("from memstore.interfaces import SavedIndex\nclass Plugin(SavedIndex): ...", "index"),
        ("from memstore.interfaces import RecordStore as R\nclass Plugin(R): ...", "records"),
        ("from memstore import interfaces\nclass Plugin(interfaces.VectorIndex): ...", "index"),
        (f"{INDEX.replace('Plugin', 'Base')}class Plugin(object, Base): ...", "index"),
        ("class Plugin: ...", "backend"),
        ("class VectorIndex: ...\nclass Plugin(VectorIndex): ...", "backend"),
        ("class Plugin(Other): ...\nclass Other(Plugin): ...", "backend"),
        ("from memstore_backends.exact import ExactIndex\nclass Plugin(ExactIndex): ...", "index"),
        ("from memstore_backends.exact import ExactIndex as Plugin", "index"),
        ("Plugin = make()", "backend"),
    ],
)
def test_the_kind_is_that_of_the_base_class(plugin: Any, source: str, kind: str) -> None:
    found = plugin(source)
    assert (found.kind, found.available) == (kind, True)
    assert "third_plugin" not in sys.modules


def test_the_kind_is_found_in_other_modules_of_a_package(plugin: Any) -> None:
    modules = {
        "third_package.__init__": "from .sub.here import Plugin",
        "third_package.sub.__init__": "",
        "third_package.sub.here": "from ..shared import Shared\nclass Plugin(Shared['x']): ...",
        "third_package.shared": "from memstore.interfaces import RecordStore\nclass Shared(RecordStore): ...",
    }
    assert plugin(modules, "third_package:Plugin").kind == "records"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import nowhere_a.b, sys, nowhere_c as c", ("nowhere_a", "nowhere_c")),
        ("from nowhere_a.b import c", ("nowhere_a",)),
        ("import warnings\nwith warnings.catch_warnings():\n    import nowhere_a", ("nowhere_a",)),
        ("import xml.dom, json\nfrom os import path", ()),
        ("try:\n    import nowhere_a\nexcept ImportError:\n    nowhere_a = None", ()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nowhere_a", ()),
        ("def later():\n    import nowhere_a", ()),
    ],
)
def test_what_is_missing_is_what_an_import_would_not_find(plugin: Any, source: str, missing: tuple[str, ...]) -> None:
    found = plugin(f"{source}\n{INDEX}")
    assert (found.available, found.missing) == (not missing, missing)
    assert found.install == (f"install the package that provides the module {missing[0]!r}" if missing else None)
    if missing:
        with pytest.raises(PluginError, match=f"needs the module '{missing[0]}.*To use it: {found.install}"):
            registry.load(registry.BACKENDS, "plugin")
    else:
        assert registry.load(registry.BACKENDS, "plugin", VectorIndex)


def test_what_is_missing_in_other_modules_of_a_package(plugin: Any) -> None:
    modules = {
        "third_package.__init__": "import nowhere_a",
        "third_package.here": f"from . import shared\nfrom .shared import x\nfrom third_package import there\n{INDEX}",
        "third_package.shared": "import nowhere_b, third_package.here\nx = 1",
        "third_package.there": "import nowhere_c",
        "third_package.unused": "import nowhere_d",
    }
    found = plugin(modules, "third_package.here:Plugin")
    assert sorted(found.missing) == ["nowhere_a", "nowhere_b", "nowhere_c"]


@pytest.mark.parametrize("extras", ["faiss", "faiss-gpu, more"])
def test_an_extra_of_the_entry_point_says_what_to_install(plugin: Any, extras: str) -> None:
    found = plugin(f"import nowhere_a\n{INDEX}", f"third_plugin:Plugin [{extras}]")
    assert found.install == f'pip install "third[{extras}]"'
    with pytest.raises(PluginError) as caught:
        registry.load(registry.BACKENDS, "plugin")
    assert str(caught.value).endswith(f"needs the module 'nowhere_a'. To use it: {found.install}.")


def test_a_module_that_cannot_be_imported_because_it_is_switched_off(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert plugin(f"import torch\n{INDEX}").missing == ("torch",)


def test_a_plugin_whose_module_is_gone(plugin: Any) -> None:
    found = plugin({}, "third_gone.sub:Plugin")
    assert (found.kind, found.available, found.install) == ("backend", False, "reinstall third")


@pytest.mark.parametrize("source", ["class Plugin(", "\0", "# coding: nonsense\n"])
def test_source_that_cannot_be_read_tells_nothing(plugin: Any, source: str) -> None:
    found = plugin(source)
    assert (found.kind, found.available, found.missing, found.install) == ("backend", None, (), None)


@pytest.mark.parametrize("module", ["third_zipped", "third_package.here"])
def test_a_zip_tells_nothing(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    with zipfile.ZipFile(tmp_path / "third.zip", "w") as archive:
        for name in ("third_zipped", "third_package/__init__", "third_package/here"):
            archive.writestr(f"{name}.py", INDEX)
    monkeypatch.syspath_prepend(str(tmp_path / "third.zip"))
    found = plugin({}, f"{module}:Plugin")
    assert (found.kind, found.available) == ("backend", None)


def test_examining_imports_neither_plugins_nor_their_libraries() -> None:
    code = (
        "import sys; from memstore.availability import installed; installed();"
        "print(*{'torch', 'transformers', 'faiss', 'memstore_backends', 'memstore_adapters'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
