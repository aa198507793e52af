"""The plugins that are installed, found through their entry points.

Listing imports nothing of a plugin; loading imports that plugin alone.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from memstore.errors import PluginError, UnsupportedModelError

BACKENDS = "memstore.backends"
ADAPTERS = "memstore.adapters"


@dataclass(frozen=True)
class PluginInfo:
    """An installed plugin; ``value`` is where it is defined, as ``module:class``."""

    name: str
    group: str
    distribution: str
    version: str
    value: str


def plugins(group: str | None = None) -> list[PluginInfo]:
    """The installed plugins of one group, or of both, ordered by group and name.

    Raises PluginError when two distributions define one name.
    """
    groups = (ADAPTERS, BACKENDS) if group is None else (group,)
    return [_info(entry) for each in groups for entry in entries(each).values()]


def info(group: str, name: str) -> PluginInfo:
    """What is known of one plugin without importing it. Raises PluginError when the name is unknown."""
    return _info(_entry(group, name))


def load(group: str, name: str, base: type | None = None) -> type[Any]:
    """Import a plugin and return its class, which must derive from ``base`` if that is given.

    Raises PluginError when the name is unknown, defined twice, cannot be imported, or is of another kind.
    """
    loaded = _import(_entry(group, name))
    if base is not None and not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise PluginError(f"Plugin {name!r} of {group} is no {base.__name__}, so it cannot be used as one.")
    return loaded


def adapter_for(model: Any) -> type[Any]:
    """The adapter class for a transformers model: the one that claims its ``config.model_type``, else one that serves
    unknown models and would try this one.

    Raises UnsupportedModelError for what is no model, when there is neither, or when the type is refused with a
    reason; PluginError when there are two.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise UnsupportedModelError(f"{type(model).__name__} is no transformers model. Give the model itself.")
    claims: dict[str, type[Any]] = {}
    willing: dict[str, type[Any]] = {}
    supported: set[str] = set()
    reasons: dict[str, str] = {}
    broken: list[str] = []
    for name, entry in entries(ADAPTERS).items():
        try:
            adapter = _import(entry)
        except PluginError as error:  # an adapter that lacks its library must not disable the others
            broken.append(str(error))
            continue
        supported.update(adapter.model_types)
        reasons.update(getattr(adapter, "refused", {}))
        if model_type in adapter.model_types:
            claims[name] = adapter
        elif not adapter.model_types and adapter.serves_unknown(model):
            willing[name] = adapter
    if not claims and model_type in reasons:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model_type!r}) cannot read a memory: {reasons[model_type]}."
        )
    claims = claims or willing
    if len(claims) > 1:
        raise PluginError(
            f"The adapters {' and '.join(claims)} both claim model_type {model_type!r}. "
            "Uninstall the distribution of one of them (`memstore plugins` shows them)."
        )
    if not claims:
        known = ", ".join(sorted(supported)) or "none"
        raise UnsupportedModelError(
            " ".join([f"No adapter knows model_type {model_type!r}. Supported: {known}.", *broken])
        )
    return claims.popitem()[1]


def _entry(group: str, name: str) -> EntryPoint:
    known = entries(group)
    if not isinstance(name, str) or name not in known:  # a class, say, in the place of a name
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PluginError(f"No plugin of {group} is named {name!r}.{hint} Installed: {', '.join(known) or 'none'}.")
    return known[name]


def entries(group: str) -> dict[str, EntryPoint]:
    """The entry points of one group by name. Raises PluginError when two distributions define one name."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        other = found.setdefault(entry.name, entry)
        if other is not entry:
            raise PluginError(
                f"{_info(other).distribution} and {_info(entry).distribution} both define the plugin "
                f"{entry.name!r} of {group}. Uninstall one of them."
            )
    return found


def installation(entry: EntryPoint, module: str) -> str:
    """What to install where a plugin lacks a module: the extra that its entry point names, if it names one."""
    _, bracket, extras = entry.value.partition("[")
    if bracket:
        return f'pip install "{_info(entry).distribution}[{extras.rstrip("] ")}]"'
    return f"install the package that provides the module {module!r}"


def _info(entry: EntryPoint) -> PluginInfo:
    # Entry points that importlib found always carry their distribution; only hand-made ones lack it.
    distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
    return PluginInfo(entry.name, entry.group, distribution, version, entry.value)


def _import(entry: EntryPoint) -> type[Any]:
    try:
        loaded: type[Any] = entry.load()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if missing.partition(".")[0] == entry.module.partition(".")[0]:
            raise PluginError(
                f"{_named(entry)} does not exist there. Reinstall {_info(entry).distribution}."
            ) from error
        raise PluginError(
            f"{_named(entry)} needs the module {missing!r}. To use it: {installation(entry, missing)}."
        ) from error
    except Exception as error:  # whatever a plugin does wrong, the others can be used
        why = str(error).rstrip(".") or type(error).__name__
        raise PluginError(f"{_named(entry)} cannot be imported: {why}.") from error
    return loaded


def _named(entry: EntryPoint) -> str:
    return f"Plugin {entry.name!r} ({entry.value}) of {_info(entry).distribution}"
