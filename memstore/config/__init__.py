"""What is configured, merged from its layers.

Later layers win: ``memstore/defaults.toml``, ``plugins.toml`` in the user's configuration directory, ``plugins.toml``
in the current directory, the chosen profile of these files, ``MEMSTORE__SECTION__KEY`` environment variables, and what
the command line says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from platformdirs import user_config_path
from pydantic import BaseModel, ValidationError

from memstore import registry
from memstore.config import profiles, sources
from memstore.config.explain import explanation, shown
from memstore.config.layers import KeyPath, Layer, Leaf, Origin, Table, dotted, merge, nested
from memstore.config.settings import Settings
from memstore.config.sources import PREFIX
from memstore.errors import ConfigError, PluginError
from memstore.interfaces import RecordStore, VectorIndex

FILE = "plugins.toml"
DEFAULTS = Path(__file__).parents[1] / "defaults.toml"
BACKEND, RECORDS, OPTIONS = ("index", "backend"), ("store", "records"), ("index", "options")

_command_line: Table = {}


class Config:
    """Settings together with where each value came from."""

    def __init__(self, layers: Iterable[Layer], profile: Leaf | None = None) -> None:
        """``profile``: which one is among the layers. Raises ConfigError for a key that does not exist or a value that
        does not fit."""
        self.profile = profile
        self.leaves = merge(layers)
        try:
            self.settings = Settings.model_validate(nested(self.leaves))
        except ValidationError as error:
            inside = any(leaf.origin.profile is not None for leaf in self.leaves.values())
            raise ConfigError(
                explanation(error, Settings, self._where, also=() if inside else profiles.KEYS)
            ) from error

    def index_plugin(
        self, backend: str | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, type[VectorIndex], BaseModel]:
        """The name, the class and the options of the named backend, or of the configured one.

        ``options`` override those that are configured, which count for the configured backend alone. Raises ConfigError
        for a wrong setting or option, PluginError when the backend named here cannot be loaded.
        """
        configured, given = self.settings.index, options or {}
        name = configured.backend if backend is None else backend
        plugin = self._plugin(name, VectorIndex, BACKEND if backend is None else None)
        below = configured.options if name == configured.backend else {}
        try:
            return name, plugin, plugin.Options.model_validate({**below, **given})
        except ValidationError as error:

            def where(path: KeyPath) -> str:
                if given and (not path or path[0] in given):
                    return f"option {dotted(path)}" if path else "options"
                return self._where((*OPTIONS, *path))

            text = explanation(error, plugin.Options, where, lambda path: _owners(path, name))
            raise ConfigError(text) from error

    def records(self) -> str:
        """The name of the configured record backend. Raises ConfigError when it cannot be loaded."""
        name = self.settings.store.records
        self._plugin(name, RecordStore, RECORDS)
        return name

    def _plugin(self, name: str, base: type, key: KeyPath | None) -> type[Any]:
        """``key``: the setting that gave the name; None for an argument."""
        try:
            return registry.load(registry.BACKENDS, name, base)
        except PluginError as error:
            text = f"{error}{_choices(base, name)}"
            if key is None:
                raise PluginError(text) from error
            raise ConfigError(f"{self._where(key)} = {shown(name)}: {text}") from error

    def _where(self, path: KeyPath) -> str:
        """The place and the key that set what a path into the settings leads to."""
        for key, leaf in self.leaves.items():
            common = min(len(key), len(path))
            if key[:common] == path[:common]:  # a path may lead into a list, or to a table of several keys
                return leaf.origin.key(path if leaf.value == {} or len(key) > len(path) else key)
        return f"configuration: {dotted(path)}"


def load(directory: Path | None = None, environ: Mapping[str, str] = os.environ, given: Table | None = None) -> Config:
    """Read every layer. ``directory`` is the project's, by default the current one; ``given`` lies above all others.

    Raises ConfigError when a file cannot be read or parsed, or says something wrong, also where it does not count: in a
    profile that is not chosen, or below another layer.
    """
    defaults = Layer(Origin("defaults"), sources.read(DEFAULTS) or {})
    files = sources.files(user_config_path("memstore") / FILE, _current(directory) / FILE)
    said = {**_command_line, **(given or {})}
    arguments = [Layer(Origin("command line"), said)] if said else []
    stack = profiles.stack([defaults, *files], [*sources.variables(environ), *arguments])
    for layer in (*stack.layers, *stack.others):
        Config([defaults, layer])
    return Config(stack.layers, stack.profile)


@contextmanager
def command_line(profile: str) -> Iterator[None]:
    """Choose a profile, for this process and those that it starts, while the context lasts."""
    variable = f"{PREFIX}PROFILE"
    before = os.environ.get(variable)
    _command_line["profile"] = os.environ[variable] = profile
    try:
        yield
    finally:
        del _command_line["profile"], os.environ[variable]
        if before is not None:
            os.environ[variable] = before


def _current(directory: Path | None) -> Path:
    try:
        return (directory or Path()).absolute()
    except FileNotFoundError:  # a current directory that was removed holds no file
        return Path()


def _owners(path: KeyPath, backend: str) -> str:
    """Which backends know the option that ``backend`` does not know. Loads them, since something is wrong already."""
    owners: list[str] = []
    for plugin in registry.plugins(registry.BACKENDS):
        try:
            options = registry.load(registry.BACKENDS, plugin.name, VectorIndex).Options.model_fields
        except PluginError:
            continue
        owners += [repr(plugin.name)] if len(path) == 1 and path[0] in options else []
    return f"it is an option of {' and '.join(owners)}, and the backend is {backend!r}." if owners else ""


def _choices(base: type, wrong: str) -> str:
    from memstore.availability import installed  # slower than all that is needed where nothing is wrong

    kind, words = ("index", "Index") if base is VectorIndex else ("records", "Record")
    try:
        found = installed(registry.BACKENDS)
    except PluginError:  # two plugins of one name, which is what went wrong
        return ""
    right = [plugin for plugin in found if plugin.kind == kind and plugin.available is not False]
    names = [plugin.name for plugin in right if plugin.name != wrong]
    return f" {words} backends that can be used here: {', '.join(names) or 'none'}."
