"""What is configured, merged from its layers.

Later layers win: ``memstore/defaults.toml``, ``plugins.toml`` in the user's configuration directory, ``plugins.toml``
in the current directory, and ``MEMSTORE__SECTION__KEY`` environment variables.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from platformdirs import user_config_path
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from memstore import registry
from memstore.errors import ConfigError, PluginError
from memstore.interfaces import RecordStore, VectorIndex

FILE = "plugins.toml"
DEFAULTS = Path(__file__).with_name("defaults.toml")
PREFIX = "MEMSTORE__"

Table = dict[str, Any]
Layer = tuple[str, Table]  # where it comes from, what it says


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # which pydantic would let through
        raise ValueError(f"{path.parts[0]} is nobody's home directory") from error


class StoreSettings(_Section):
    """``[store]``: where memories are kept, and by which record backend."""

    path: Annotated[Path, AfterValidator(_expanded)]
    records: str


class IndexSettings(_Section):
    """``[index]``: which backend searches a memory; ``options`` are checked by that backend when it is loaded."""

    backend: str
    options: dict[str, Any] = {}


class Settings(_Section):
    """All that can be configured."""

    store: StoreSettings
    index: IndexSettings


class Config:
    """Settings together with where each value came from."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        """Raises ConfigError for a key that does not exist or a value that does not fit."""
        merged: Table = {}
        self.origins: dict[str, str] = {}
        for origin, table in layers:
            self._overlay(merged, table, origin, "")
        try:
            self.settings = Settings.model_validate(merged)
        except ValidationError as error:
            raise self._explain(error, Settings) from error

    def index_plugin(
        self, backend: str | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, type[VectorIndex], BaseModel]:
        """The name and class of the backend named here, or of the configured one, and its options: those configured for
        it, overridden by those given here.

        Raises ConfigError for a wrong setting, PluginError when the backend named here cannot be loaded.
        """
        configured = self.settings.index
        if backend is None:
            plugin = self._plugin("index.backend", configured.backend, VectorIndex)
        else:
            plugin = registry.load(registry.BACKENDS, backend, VectorIndex)
        chosen = dict(configured.options) if backend in (None, configured.backend) else {}
        try:
            return backend or configured.backend, plugin, plugin.Options.model_validate(chosen | dict(options or {}))
        except ValidationError as error:
            raise self._explain(error, plugin.Options, "index.options") from error

    def index(self, backend: str | None = None) -> VectorIndex:
        """A new, empty index. Raises what :meth:`index_plugin` raises."""
        _, plugin, options = self.index_plugin(backend)
        return plugin(options)

    def records(self) -> str:
        """The name of the configured record backend. Raises ConfigError when it cannot be loaded."""
        name = self.settings.store.records
        self._plugin("store.records", name, RecordStore)
        return name

    def _plugin(self, key: str, name: str, base: type) -> type[Any]:
        try:
            return registry.load(registry.BACKENDS, name, base)
        except PluginError as error:
            raise ConfigError(f"{self.origins[key]}: {key} = {name!r}: {error}") from error

    def _overlay(self, below: Table, above: Table, origin: str, prefix: str) -> None:
        if "backend" in above and above["backend"] != below.get("backend"):
            below.pop("options", None)  # they belong to the backend that is being replaced
            self.origins = {k: v for k, v in self.origins.items() if not k.startswith(f"{prefix}options.")}
        for key, value in above.items():
            if isinstance(value, dict) != isinstance(below.get(key, value), dict):
                kind = "a table" if isinstance(below[key], dict) else "a single value"
                raise ConfigError(f"{origin}: {prefix}{key} = {value!r}: must be {kind}.")
            if isinstance(value, dict):
                self._overlay(below.setdefault(key, {}), value, origin, f"{prefix}{key}.")
            else:
                below[key] = value
                self.origins[f"{prefix}{key}"] = origin

    def _explain(self, error: ValidationError, model: type[BaseModel], table: str = "") -> ConfigError:
        return ConfigError("\n".join(self._line(detail, model, table) for detail in error.errors()))

    def _line(self, detail: Any, model: type[BaseModel], table: str) -> str:
        path = [str(part) for part in detail["loc"]]
        key = ".".join(filter(None, [table, *path]))
        origin = next((o for k, o in self.origins.items() if k == key or k.startswith(f"{key}.")), "configuration")
        value = "" if detail["type"] == "missing" else f" = {detail['input']!r}"
        if detail["type"] != "extra_forbidden":
            return f"{origin}: {key}{value}: {detail['msg']}."
        known = _fields(model, path[:-1])
        close = difflib.get_close_matches(path[-1], known, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'nothing'}."
        return f"{origin}: {key}{value}: there is no such key; {fix}"


def load(directory: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read every layer; ``directory`` is the project's, by default the current one.

    Raises ConfigError when a file cannot be read or parsed, or says something wrong.
    """
    files = [DEFAULTS, user_config_path("memstore") / FILE, (directory or Path.cwd()) / FILE]
    layers = [(str(file), _read(file)) for file in files if file.is_file()]
    layers += [_variable(name, value) for name, value in sorted(environ.items()) if name.startswith(PREFIX)]
    return Config(layers)


def _read(file: Path) -> Table:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{file}: is not valid TOML: {error}.") from error


def _variable(name: str, value: str) -> Layer:
    table: Any = value
    for key in reversed(name.removeprefix(PREFIX).lower().split("__")):
        table = {key: table}
    return name, table


def _fields(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
