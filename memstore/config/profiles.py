"""Profiles: what a ``plugins.toml`` says under ``[profiles.NAME]``, laid over all files when that name is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memstore.config.explain import closest, shown
from memstore.config.layers import Layer, Leaf, Origin, dotted
from memstore.errors import ConfigError

KEYS = ("profile", "profiles")  # what a file may say at its top beside the settings


class Stack(NamedTuple):
    """The layers that count, lowest first; the profiles that are not chosen; and the name of the one that is."""

    layers: list[Layer]
    others: list[Layer]
    profile: Leaf | None


def stack(files: Sequence[Layer], above: Sequence[Layer]) -> Stack:
    """Lay the profile that any of the layers chooses over the files and below what is ``above`` them.

    Raises ConfigError for a profile that does not exist, and one that is no table.
    """
    for origin, table in above:
        if "profiles" in table:
            raise ConfigError(f"{origin.place}: profiles are defined in plugins.toml alone, as {_EXAMPLE}.")
    profiles = [profile for file in files for profile in _profiles(file)]
    chosen = [Leaf(table["profile"], origin) for origin, table in (*files, *above) if "profile" in table]
    profile = chosen[-1] if chosen else None
    if profile is not None:
        _check(profile, profiles)
    on = [layer for layer in profiles if profile and layer.origin.profile == profile.value]
    others = [layer for layer in profiles if layer not in on]
    return Stack([*map(_settings, files), *on, *map(_settings, above)], others, profile)


def _table(name: str) -> str:
    """What a profile may begin with."""
    return f"[{dotted(('profiles', name, 'index'))}]"


_EXAMPLE = _table("gpu")


def _profiles(file: Layer) -> Iterator[Layer]:
    place, profiles = file.origin.place, file.table.get("profiles", {})
    if not isinstance(profiles, dict):
        raise ConfigError(f"{place}: profiles = {shown(profiles)}: must be a table of profiles, as {_EXAMPLE}.")
    for name, table in profiles.items():
        if not isinstance(table, dict):
            key = dotted(("profiles", name))
            raise ConfigError(f"{place}: {key} = {shown(table)}: must be a table of settings, as {_table(name)}.")
        yield Layer(Origin(place, name), table)


def _settings(layer: Layer) -> Layer:
    return Layer(layer.origin, {key: value for key, value in layer.table.items() if key not in KEYS})


def _check(profile: Leaf, profiles: Sequence[Layer]) -> None:
    places: dict[str, list[str]] = {}
    for layer in profiles:
        places.setdefault(str(layer.origin.profile), []).append(layer.origin.place)
    if profile.value in list(places):  # a list, because what a file says need not be hashable
        return
    what = f"{profile.origin.key(('profile',))} = {shown(profile.value)}"
    if not isinstance(profile.value, str):
        raise ConfigError(f"{what}: must be the name of a profile. Profiles are defined as {_EXAMPLE}.")
    if not places:
        raise ConfigError(f"{what}: no plugins.toml defines a profile. Define it as {_table(profile.value)}.")
    defined = ", ".join(f"{name!r} (in {' and '.join(files)})" for name, files in places.items())
    close = closest(profile.value, places)
    raise ConfigError(f"{what}: there is no such profile{'; ' if close else '.'}{close} Defined: {defined}.")
