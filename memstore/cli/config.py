"""``memstore config show``: what is configured, and by what."""

from __future__ import annotations

from datetime import date, time
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore import config
from memstore.cli.common import JsonOption, StoreOption, write_json
from memstore.toml import comment, dotted, dumps


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
        document = {"profile": chosen and chosen.value, "configuration": _plain(settings)}
        write_json(document | ({"origins": origins} if origin else {}))
        return
    if chosen is not None:
        typer.echo(comment(f"profile {chosen.value}{f', chosen by {chosen.origin}' if origin else ''}") + "\n")
    notes = {path: str(leaf.origin) for path, leaf in loaded.leaves.items()}
    typer.echo(dumps(settings, notes if origin else {}), nl=False)


def _plain(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    unknown = isinstance(value, Path | date | time) or (isinstance(value, float) and not isfinite(value))
    return str(value) if unknown else value
