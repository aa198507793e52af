"""Where configuration comes from: tables that overlay each other, merged into values that know their origin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

KeyPath = tuple[str, ...]
Table = dict[str, Any]


def dotted(path: KeyPath) -> str:
    """A key as it is written in TOML: ``index.options."a.b"``."""
    return ".".join(
        key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False) for key in path
    )


class Origin(NamedTuple):
    """Where a value stands: a file, a variable or the command line, and in which profile of it."""

    place: str
    profile: str | None = None

    def __str__(self) -> str:
        return f"{self.place} [{dotted(self._prefix)}]" if self.profile is not None else self.place

    def key(self, path: KeyPath) -> str:
        """``FILE: profiles.gpu.index.backend``: where this key is to be corrected."""
        return f"{self.place}: {dotted((*self._prefix, *path))}"

    @property
    def _prefix(self) -> KeyPath:
        return () if self.profile is None else ("profiles", self.profile)


class Layer(NamedTuple):
    """What one origin says."""

    origin: Origin
    table: Table


class Leaf(NamedTuple):
    """A single value, or an empty table, and where it comes from."""

    value: Any
    origin: Origin


Tree = dict[str, "Tree | Leaf"]


def merge(layers: Iterable[Layer]) -> dict[KeyPath, Leaf]:
    """The values of all layers, of which later ones win. A changed ``backend`` empties the ``options`` beside it."""
    tree: Tree = {}
    for origin, table in layers:
        _overlay(tree, table, origin)
    return dict(_leaves(tree, ()))


def nested(leaves: Mapping[KeyPath, Leaf]) -> Table:
    """The table that these values make."""
    table: Table = {}
    for path, leaf in leaves.items():
        inner = table
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = leaf.value
    return table


def _overlay(below: Tree, above: Table, origin: Origin) -> None:
    backend = below.get("backend")
    if "backend" in above and isinstance(backend, Leaf) and backend.value != above["backend"]:
        below["options"] = Leaf({}, origin)  # they belong to the backend that is being replaced
    for key, value in above.items():
        old = below.get(key)
        if isinstance(value, dict) and value:
            inner = below[key] = old if isinstance(old, dict) else {}
            _overlay(inner, value, origin)
        elif value != {} or not (isinstance(old, dict) or (old and old.value == {})):
            below[key] = Leaf(value, origin)  # but an empty table adds nothing to a table


def _leaves(tree: Tree, path: KeyPath) -> Iterator[tuple[KeyPath, Leaf]]:
    for key, node in tree.items():
        if isinstance(node, Leaf):
            yield (*path, key), node
        else:
            yield from _leaves(node, (*path, key))
