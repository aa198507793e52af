"""``memstore sync``: bring the memories of a folder's texts up to date."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memstore import documents
from memstore.cli.common import (
    DtypeOption,
    JsonOption,
    ModelOption,
    StoreOption,
    complain,
    load_model,
    open_store,
    out,
    write_json,
)
from memstore.cli.index import ReadingProgress, StoredAsOption, about, reused
from memstore.errors import MemstoreError, StoreNotFoundError
from memstore.sources import Folder, refresh
from memstore.syncing import Comparison, adopt, compare, remove_gone


def sync(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help=f"Its {', '.join(documents.SUFFIXES)} files, each named by its path inside it without suffix.",
            show_default=False,
        ),
    ],
    model: ModelOption,
    store: StoreOption = None,
    moved_from: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Where the folder was when its memories were made, if it, or the store, has been moved since.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    dtype: DtypeOption = "float32",
    stored_as: StoredAsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read what was added to a folder, read again what changed in it, and remove what is gone from it.

    A memory is removed only if sync of this folder has seen its file. The model is loaded only if there is something to
    read.
    """
    if moved_from == "":
        raise typer.BadParameter("names no folder. Is a variable not set?", param_hint="--moved-from")
    place = Folder(folder, moved_from)
    try:
        with open_store(store, "r") as opened:
            found, exists = compare(opened, place, stored_as), True
    except StoreNotFoundError:
        found, exists = compare(None, place), False
    done: dict[str, Any] = {"added": [], "changed": [], "removed": [], "failed": []}

    def fail(name: str, message: str) -> None:
        complain(message)
        done["failed"].append({"name": name, "error": message})

    for document, error in found.failed:
        fail(document.name, about(document, error))
    if dry_run:
        _tell(found, done, as_json)
    elif exists or found.added:  # also with nothing to do: what a killed process left goes
        reading = found.added + found.changed
        loaded = load_model(model, dtype) if reading else None
        with open_store(store, "a") as opened:
            for document in reading:
                assert loaded is not None
                what = "added" if document in found.added else "changed"
                try:
                    with ReadingProgress(document.name) as progress:
                        text = document.read()
                        update = refresh(
                            opened, *loaded, document, text, folder=place, dtype=stored_as, progress=progress
                        )
                except MemstoreError as error:
                    fail(document.name, about(document, error))
                    continue
                facts = {"name": document.name, "windows": update.num_windows, "reused": update.num_reused}
                done[what].append(facts)
                if not as_json:
                    out.print(f"{what} {document.name}{reused(update)}", soft_wrap=True)
            failed = adopt(opened, place, found.unchanged)
            done["removed"], not_removed = remove_gone(opened, place)
            for document, problem in failed + not_removed:
                fail(document.name, about(document, problem))
            if not as_json:
                for name in done["removed"]:
                    out.print(f"removed {name}", soft_wrap=True)
    unchanged = [document.name for document in found.unchanged]
    if as_json:
        write_json({**done, "unchanged": unchanged, "dry_run": dry_run})
    else:
        counts = [f"{len(done[what])} {what}" for what in ("added", "changed", "removed")]
        counts += [f"{len(unchanged)} unchanged"] + ([f"{len(done['failed'])} failed"] if done["failed"] else [])
        out.print(f"{', '.join(counts)}{' (dry run)' if dry_run else ''}", soft_wrap=True)
    if done["failed"]:
        raise typer.Exit(1)


def _tell(found: Comparison, done: dict[str, Any], as_json: bool) -> None:
    for what in ("added", "changed"):
        done[what] = [{"name": document.name} for document in getattr(found, what)]
    done["removed"] = list(found.removed)
    if not as_json:
        for what in ("added", "changed"):
            for each in done[what]:
                out.print(f"would be {what}: {each['name']}", soft_wrap=True)
        for name in done["removed"]:
            out.print(f"would be removed: {name}", soft_wrap=True)
