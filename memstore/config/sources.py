"""Reading what configures: ``plugins.toml`` files and ``MEMSTORE__…`` variables. What they say is checked elsewhere."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memstore.config.layers import Layer, Origin, Table
from memstore.errors import ConfigError

PREFIX = "MEMSTORE__"
DEEPEST = 32  # tables and lists within each other; no setting needs more


def files(*paths: Path) -> Iterator[Layer]:
    """The files among these that exist, each as a layer. Raises ConfigError for one that cannot be read or parsed."""
    for path in paths:
        table = read(path)
        if table is not None:
            yield Layer(Origin(str(path)), table)


def read(path: Path) -> Table | None:
    """The tables of a TOML file, or None if there is no such file. Raises ConfigError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.lexists(path):
            return None
        raise ConfigError(f"{path}: is a link that leads nowhere. Mend or remove it.") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder, where a file is read. Rename it.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: is not UTF-8: byte 0x{error.object[error.start]:02x} in line {line}. Save it as UTF-8."
        ) from error
    try:
        table = tomllib.loads(text)
        _check(table, 0)
    except RecursionError as error:
        raise ConfigError(f"{path}: is not valid TOML: it is nested too deeply.") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}.") from error
    return table


def _check(value: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise ValueError(f"nothing here is nested more than {DEEPEST} deep")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number must fit into 64 bits")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check(each, depth + 1)


def variables(environ: Mapping[str, str]) -> list[Layer]:
    """The ``MEMSTORE__SECTION__KEY`` variables, each as a layer. Raises ConfigError for a name that is none."""
    named = {name: tuple(name.removeprefix(PREFIX).lower().split("__")) for name in environ if name.startswith(PREFIX)}
    by_key: dict[tuple[str, ...], str] = {}
    for name, path in named.items():
        if "" in path or len(path) > DEEPEST:
            raise ConfigError(f"{name}: is not the name of a setting. They are named as MEMSTORE__STORE__PATH is.")
        other = by_key.setdefault(path, name)
        if other != name:
            raise ConfigError(f"{name}: sets the same as {other}. Unset one of them.")
    return [Layer(Origin(by_key[path]), _nested(path, environ[by_key[path]])) for path in sorted(by_key)]


def _nested(path: tuple[str, ...], value: str) -> Table:
    table: Any = value
    for key in reversed(path):
        table = {key: table}
    return dict(table)
