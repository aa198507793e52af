"""Reading what configures: ``plugins.toml`` files and ``MEMSTORE__…`` variables. What they say is checked elsewhere."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from memstore.config.layers import KeyPath, Layer, Leaf, Origin, Table, nested
from memstore.errors import ConfigError

PREFIX = "MEMSTORE__"


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
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}.") from error


def variables(environ: Mapping[str, str]) -> list[Layer]:
    """The ``MEMSTORE__SECTION__KEY`` variables, each as a layer. Raises ConfigError for a name that is none."""
    names: dict[KeyPath, str] = {}
    for name in environ:
        if name.startswith(PREFIX):
            path = tuple(name.removeprefix(PREFIX).lower().split("__"))
            if "" in path:
                raise ConfigError(f"{name}: is not the name of a setting. They are named as MEMSTORE__STORE__PATH is.")
            if path in names:
                raise ConfigError(f"{name}: sets the same as {names[path]}. Unset one of them.")
            names[path] = name
    # In the order of their keys, because a backend drops the options of the layers below it.
    return [_layer(names[path], path, environ[names[path]]) for path in sorted(names)]


def _layer(name: str, path: KeyPath, value: str) -> Layer:
    origin = Origin(name)
    return Layer(origin, nested({path: Leaf(value, origin)}))
