"""What kind of plugin is installed, and whether it could be loaded, found without running a line of it.

A plugin's source is parsed instead of imported: the base class tells its kind, and the modules that it imports at its
top, in whatever file of its own package, are looked for and not loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from memstore import registry
from memstore.registry import PluginInfo

Kind = Literal["index", "records", "adapter", "backend"]
BASES: dict[str, Kind] = {"VectorIndex": "index", "RecordStore": "records"}


@dataclass(frozen=True)
class InstalledPlugin(PluginInfo):
    """A plugin and whether it can be loaded: ``available`` is None where that cannot be told from its source.

    ``kind`` is "backend" for one of which the source does not tell what it is. ``missing``: modules that it imports and
    that are not there; ``install`` says in words what to do about it.
    """

    kind: Kind
    available: bool | None
    missing: tuple[str, ...]
    install: str | None


def installed(group: str | None = None) -> list[InstalledPlugin]:
    """The plugins of one group, or of both, ordered by group and name.

    Raises PluginError when two distributions define one name.
    """
    sources = _Sources()
    return [_examine(info, registry.entries(info.group)[info.name], sources) for info in registry.plugins(group)]


def _examine(info: PluginInfo, entry: EntryPoint, sources: _Sources) -> InstalledPlugin:
    kind: Kind = "adapter" if info.group == registry.ADAPTERS else sources.kind(entry.module, entry.attr) or "backend"
    missing = sources.missing(entry.module)
    install = None
    if missing:
        own = missing[0] == _top(entry.module)
        install = f"reinstall {info.distribution}" if own else registry.installation(entry, missing[0])
    available = None if missing is None else not missing
    return InstalledPlugin(**vars(info), kind=kind, available=available, missing=missing or (), install=install)


class _Sources:
    """Parsed modules by their full names."""

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[ast.Module, str] | None] = {}

    def parsed(self, module: str) -> tuple[ast.Module, str] | None:
        """The tree of a module and the package that its relative imports start from; None without readable source."""
        if module not in self._parsed:
            path = _source(module)
            try:
                tree = None if path is None else ast.parse(path.read_bytes())
            except (OSError, RecursionError, SyntaxError, ValueError):
                tree = None
            inside = path is not None and path.name == "__init__.py"
            package = module if inside else module.rpartition(".")[0]
            self._parsed[module] = None if tree is None else (tree, package)
        return self._parsed[module]

    def kind(self, module: str, name: str, depth: int = 0) -> Kind | None:
        """What a class is, by the bases of it and of its bases."""
        if module == "memstore.interfaces" and name in BASES:
            return BASES[name]
        found = self.parsed(module)
        if found is None or depth > 20:  # classes in a circle
            return None
        tree, package = found
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                kinds = [self._base(module, base, depth) for base in node.bases]
                return next(filter(None, kinds), None)
            for source, original, alias in _names(node, package):
                if alias == name:
                    return self.kind(source, original, depth + 1)
        return None

    def _base(self, module: str, base: ast.expr, depth: int) -> Kind | None:
        if isinstance(base, ast.Subscript):  # a generic class
            base = base.value
        if isinstance(base, ast.Attribute):
            return BASES.get(base.attr)
        return self.kind(module, base.id, depth + 1) if isinstance(base, ast.Name) else None

    def missing(self, module: str) -> tuple[str, ...] | None:
        """The modules that an import of this one would not find; None if there is no source to tell."""
        top = _top(module)
        if not _exists(top):
            return (top,)
        if self.parsed(module) is None:
            return None
        lacking: dict[str, None] = {}
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            waiting += [current.rpartition(".")[0]] if "." in current else []
            found = self.parsed(current)
            for imported in _imports(*found) if found else ():
                if _top(imported) == top:
                    waiting.append(imported)
                elif not _exists(_top(imported)):
                    lacking[_top(imported)] = None
        return tuple(lacking)


def _source(module: str) -> Path | None:
    """The file of a module, found without importing the packages that it lies in."""
    top, *below = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in (folder / "__init__.py", Path(f"{folder}.py"))]
    files += [Path(spec.origin)] if spec.origin and not below else []
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _exists(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except ImportError:
        return False
    except ValueError:  # it is loaded, in some way of its own
        return True


def _top(module: str) -> str:
    return module.partition(".")[0]


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """The modules that are imported wherever this one is: not under a condition, in a function, or in a try."""
    waiting: list[ast.stmt] = list(tree.body)
    for node in waiting:
        if isinstance(node, ast.With):
            waiting += node.body
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        for source, original, _ in _names(node, package):
            yield from (source, f"{source}.{original}")  # which may be a module too


def _names(node: ast.stmt, package: str) -> Iterable[tuple[str, str, str]]:
    """``from a import b as c`` as (a, b, c), with a relative a made absolute."""
    if not isinstance(node, ast.ImportFrom):
        return []
    base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    source = ".".join([*base, *([node.module] if node.module else [])])
    return [(source, alias.name, alias.asname or alias.name) for alias in node.names]
