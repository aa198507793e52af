"""``memstore config show``: what is configured, and by what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer
from tomlkit.container import Container
from tomlkit.items import Item, Table

from memstore import config
from memstore.cli.common import JsonOption, StoreOption, write_json
from memstore.config.layers import KeyPath, dotted


def show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the configuration that a command run here would use, as a complete plugins.toml.

    Backends are neither loaded nor asked whether they know their options.
    """
    loaded = config.load(given=None if store is None else {"store": {"path": str(store)}})
    settings, chosen = loaded.settings.model_dump(), loaded.profile
    if as_json:
        origins = {dotted(path): str(leaf.origin) for path, leaf in loaded.leaves.items()}
        origins |= {} if chosen is None else {"profile": str(chosen.origin)}
        plain = json.loads(json.dumps(settings, default=str), parse_constant=str)  # JSON has no dates and no infinity
        document = {"profile": chosen and chosen.value, "configuration": plain}
        write_json(document | ({"origins": origins} if origin else {}))
        return
    shown = tomlkit.document()
    if chosen is not None:
        by = f", chosen by {chosen.origin}" if origin else ""
        shown.add(tomlkit.comment(_one_line(f"profile {chosen.value}{by}")))
        shown.add(tomlkit.nl())
    notes = {path: _one_line(str(leaf.origin)) for path, leaf in loaded.leaves.items()} if origin else {}
    _fill(shown, settings, notes, ())
    text = tomlkit.dumps(shown).encode("utf-8", "replace").decode()  # TOML has no text for bytes that are none
    typer.echo(text, nl=False)


def _fill(table: Container | Table, settings: Mapping[str, Any], notes: Mapping[KeyPath, str], path: KeyPath) -> None:
    """Add the settings, of which each has the note of its path behind it."""
    for key, value in settings.items():
        here = (*path, key)
        item: Item
        if isinstance(value, dict):
            item = tomlkit.table()
            _fill(item, value, notes, here)
        elif isinstance(value, list):
            item = tomlkit.array()  # also of tables, which could have no note as [[tables]]
            item.extend(value)
        else:
            item = tomlkit.item(str(value) if isinstance(value, Path) else value)
        if here in notes:
            item.comment(notes[here])
        table.add(key, item)


def _one_line(text: str) -> str:
    """The text, in quotes if it has characters that a comment must not have."""
    return text if text.isprintable() else repr(text)
