"""``memstore reindex``: build an index of a memory."""

from __future__ import annotations

from typing import Annotated

import typer

from memstore.cli.common import JsonOption, StoreOption, err, open_store, out, size, write_json
from memstore.cli.library import NameArgument


def reindex(
    name: NameArgument,
    backend: Annotated[
        str | None, typer.Option("--backend", help="What to build it with. Default: the configured one.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the backend; may be repeated."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build an index of a memory from its stored vectors. Nothing is encoded again, and no model is needed."""
    options = dict(_pair(each) for each in option or ())
    with open_store(store, "r") as opened:
        opened[name]  # mode "a" alone would create a store where a mistyped path leads
    with open_store(store, "a") as opened, err.status(f"Building the index of {name} …"):
        built, record = opened.reindex(name, backend, options)
    if as_json:
        write_json({"name": name, "backend": built, "index": None if record is None else record.model_dump()})
    elif record is None:
        out.print(f"{built} searches the stored vectors themselves: there is nothing to keep.", soft_wrap=True)
    else:
        out.print(f"{name}: {built}, built in {record.seconds:.1f} s, {size(record.nbytes)}", soft_wrap=True)


def _pair(option: str) -> tuple[str, str]:
    key, equals, value = option.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{option!r} must be KEY=VALUE, such as nlist=64.", param_hint="--option")
    return key, value
