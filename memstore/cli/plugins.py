"""``memstore plugins``: what is installed."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from memstore import registry
from memstore.cli.common import JsonOption, out, write_json


def plugins(as_json: JsonOption = False) -> None:
    """List the installed adapters and backends."""
    found = registry.plugins()
    if as_json:
        write_json({"plugins": [dataclasses.asdict(plugin) for plugin in found]})
        return
    table = Table("group", "name", "distribution", "defined in", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for plugin in found:
        table.add_row(plugin.group, plugin.name, f"{plugin.distribution} {plugin.version}", plugin.value)
    out.print(table)
