"""``memstore plugins``: what is installed."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from memstore.availability import InstalledPlugin, installed
from memstore.cli.common import JsonOption, out, write_json


def plugins(as_json: JsonOption = False) -> None:
    """List the installed adapters and backends, whether they can be used, and what to install where not."""
    found = installed()
    if as_json:
        write_json({"plugins": [dataclasses.asdict(plugin) for plugin in found]})
        return
    table = Table("name", "kind", "distribution", "version", "available", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for plugin in found:
        table.add_row(plugin.name, plugin.kind, plugin.distribution, plugin.version, _available(plugin))
    out.print(table)


def _available(plugin: InstalledPlugin) -> str:
    if plugin.available is None:
        return "unknown"
    return "yes" if plugin.available else f"no: {plugin.install}"
