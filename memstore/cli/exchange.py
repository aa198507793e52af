"""``memstore export`` and ``memstore import``: memories as safetensors and JSON. Neither loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.cli.common import JsonOption, StoreOption, collected, err, open_store, out, size, write_json

if TYPE_CHECKING:
    from memstore.memory import Memory


def export(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME…", help="Memories of the store, or patterns such as '*'.", show_default=False),
    ],
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Where each gets a folder of its own; made if missing."),
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write memories as safetensors and JSON, for other programs or another store. Indexes are not among it."""
    from memstore.exporting import export_memory

    done: list[dict[str, str]] = []
    failed: list[dict[str, str]] = []
    with open_store(store, "r") as opened:
        memories: dict[str, Memory] = {}
        for name in names:
            with collected(failed, name=name):
                memories |= {memory.name: memory for memory in opened.matching(name)}
        for memory in memories.values():
            with collected(failed, name=memory.name):
                with err.status(f"Exporting {memory.name} …"):
                    path = export_memory(memory, folder)
                done.append({"name": memory.name, "folder": str(path)})
                if not as_json:
                    out.print(f"{memory.name}: {path}", soft_wrap=True)
    if as_json:
        write_json({"exported": done, "failed": failed})
    if failed:
        raise typer.Exit(1)


def import_memories(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="What `memstore export` wrote to, or one of the folders in it."),
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring exported memories into a store, under their own names. Those that are there already stay as they are."""
    from memstore.importing import exported, import_memory

    done: list[dict[str, object]] = []
    failed: list[dict[str, str]] = []
    found = exported(folder)  # a wrong path must not leave an empty store
    with open_store(store, "a") as opened:
        there = set(opened.names())
        for path in found:
            with collected(failed, folder=str(path)):
                with err.status(f"Importing {path} …"):
                    memory = import_memory(opened, path)
                facts = {"name": memory.name, "num_tokens": memory.num_tokens, "nbytes": memory.nbytes}
                done.append({**facts, "already": memory.name in there})
                if not as_json:
                    how = ", is there already" if memory.name in there else ""
                    words = f"{memory.name}: {memory.num_tokens:,} tokens, {size(memory.nbytes)}{how}"
                    out.print(words, soft_wrap=True)
    if as_json:
        write_json({"imported": done, "failed": failed})
    if failed:
        raise typer.Exit(1)
