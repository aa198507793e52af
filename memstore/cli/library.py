"""``memstore list``, ``show``, ``remove`` and ``verify``: what a store holds. None of them loads torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import suppress
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from memstore import catalog, config
from memstore.auto import choose
from memstore.cli.common import (
    DtypeOption,
    JsonOption,
    StoreOption,
    collected,
    complain,
    load_model,
    note_that,
    open_store,
    out,
    size,
    store_place,
    write_json,
)
from memstore.errors import MemoryNotFoundError
from memstore.store import told_unfinished

if TYPE_CHECKING:
    from memstore.index_record import IndexRecord
    from memstore.memory import Memory
    from memstore.store import MemoryStore

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A memory of the store.", show_default=False)]


def list_memories(
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="[PATTERN]", help="A name, or a pattern such as 'gospel-*'.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the memories of a store, all or those whose names fit a pattern."""
    with open_store(store, "r") as opened:
        chosen: list[Memory] = []
        with suppress(MemoryNotFoundError):
            chosen = opened.memories() if pattern is None else opened.matching(pattern)
        memories = [_facts(memory) for memory in chosen]
        unfinished = [each.name for each in opened.unfinished() if pattern is None or _fits(each.name, pattern)]
        complete = [name for name in unfinished if name in opened]
    if as_json:
        write_json({"memories": memories, "unfinished": unfinished})
        return
    table = Table("name", "tokens", "size", "kind", "model", "written", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # never an ellipsis: a name must be readable in full
    for facts in memories:
        written = facts["created"][:16].replace("T", " ")
        table.add_row(
            facts["name"], f"{facts['num_tokens']:,}", size(facts["nbytes"]), facts["kind"], facts["model"], written
        )
    empty = "The store is empty." if pattern is None else f"No memory's name fits {pattern!r}."
    out.print(table if memories else empty, soft_wrap=not memories)
    if unfinished:
        note_that(told_unfinished(unfinished, complete))


def show(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what is known of a memory."""
    with open_store(store, "r") as opened:
        memory = opened[name]
        manifest, indexes = memory.manifest, opened.indexes(name)
        facts = _facts(memory) | {
            "id": manifest.id,
            "adapter": manifest.adapter,
            "window": manifest.rule.window,
            "overlap": manifest.rule.overlap,
            "parts": {part: spec.model_dump(mode="json") for part, spec in manifest.parts.items()},
            "has_text": manifest.has_text,
            "device": manifest.device,
            "document_digest": manifest.document_digest,
            "metadata": memory.metadata,
            "fingerprint": memory.fingerprint,
            "indexes": [_index_facts(record) for record in indexes],
            "searched_by": choose(config.load(), None, manifest, indexes)._asdict(),
        }
    if as_json:
        write_json(facts)
        return
    fingerprint, parts, kept = facts.pop("fingerprint"), facts.pop("parts"), facts.pop("indexes")
    searched = facts.pop("searched_by")
    facts["nbytes"] = f"{facts['nbytes']:,} ({size(facts['nbytes'])})"
    facts["parts"] = _parts_in_words(parts)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), str(value))
    for key, value in fingerprint.items():
        table.add_row(f"fingerprint: {key}", str(value))
    table.add_row("searched by", f"{searched['backend']}: {searched['reason']}")
    for index in kept:
        table.add_row(f"index: {index['backend']}", _index_in_words(index))
    out.print(table)


def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME…",
            help="Memories of the store, unfinished ones too, or patterns such as 'gospel-*'. The name of a memory "
            "is no pattern.",
            show_default=False,
        ),
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove memories from a store and give their space back."""
    removed: list[str] = []
    failed: list[dict[str, str]] = []
    with open_store(store, "r"):
        pass  # mode "a" alone would create a store where a mistyped path leads
    with open_store(store, "a") as opened:

        def give_up(name: str) -> None:
            del opened[name]
            removed.append(name)
            if not as_json:
                out.print(f"Removed {name}.", soft_wrap=True)

        for name in names:
            with collected(failed, name=name):
                try:
                    give_up(name)
                except MemoryNotFoundError:
                    for fitting in _fitting(opened, name):
                        with collected(failed, name=fitting):
                            give_up(fitting)
    if as_json:
        write_json({"removed": removed, "failed": failed})
    if failed:
        raise typer.Exit(1)


def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A memory, or a pattern such as 'gospel-*'; by default all.", show_default=False
        ),
    ] = None,
    store: StoreOption = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Rebuild what is damaged and can be: catalog, indexes, and with --model vectors."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model that wrote what is to be rebuilt.", show_default=False),
    ] = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Check every record of one memory, of several or of all. Exit status 1 if any is damaged."""
    if model is not None and not repair:
        raise typer.BadParameter("is for --repair.", param_hint="--model")
    mended = _mended(store) if repair else []
    with open_store(store, "a" if repair else "r") as opened:
        loaded, tokenizer = (None, None) if model is None else load_model(model, dtype)
        results = opened.verify(name, repair=repair, model=loaded, tokenizer=tokenizer)
        strays = (
            [] if name is not None else [str(opened.records.folder(each)) for each in catalog.strays(opened.records)]
        )
    for result in results:
        for note in result.notes:
            note_that(f"{result.name}: {note}")
        if not result.ok:
            complain(f"{result.name} is damaged: {' '.join(result.problems)}")
        elif not as_json:
            out.print(" ".join([f"{result.name} is intact.", *result.repaired]), soft_wrap=True)
    for folder in strays:
        note_that(
            f"{folder} belongs to no memory that the catalog names: its record is lost. Encode the document again; "
            "then the folder may be deleted by hand."
        )
    if not results and not strays and not as_json:
        out.print("The store is empty.")
    if as_json:
        facts = [dataclasses.asdict(result) for result in results]
        write_json({"memories": facts, "mended": mended, "strays": strays})
    whole = all(result.ok for result in results)
    if strays or not whole:
        if not whole and not repair:
            note_that(
                "`memstore verify --repair` rebuilds what can be rebuilt; with --model MODEL, the one that wrote it, "
                "damaged vectors too."
            )
        raise typer.Exit(1)


def _mended(store: Path | None) -> list[str]:
    """What was done to a catalog that was damaged. Raises StoreNotFoundError where there is none."""
    from memstore.repair import mend_catalog

    path, records = store_place(store)
    done = mend_catalog(path, records)
    for what in done:
        note_that(what)
    with open_store(store, "r"):
        pass  # mode "a" alone would create a store where a mistyped path leads
    return done


def _fitting(store: MemoryStore, name: str) -> list[str]:
    """The names of the memories, unfinished ones too, that fit a pattern. Raises MemoryNotFoundError if none does."""
    held = {*store.names(), *(manifest.name for manifest in store.unfinished())}
    return sorted(each for each in held if fnmatchcase(each, name)) or [each.name for each in store.matching(name)]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _facts(memory: Memory) -> dict[str, Any]:
    return {
        "name": memory.name,
        "kind": memory.kind,
        "num_tokens": memory.num_tokens,
        "nbytes": memory.nbytes,
        "model": memory.fingerprint.get("model_class", "unknown"),
        "created": _time(memory.created),
    }


def _index_facts(record: IndexRecord) -> dict[str, Any]:
    facts = record.model_dump(include={"backend", "seconds", "options", "tuned", "quality"})
    return facts | {"nbytes": record.nbytes, "created": _time(record.created)}


def _index_in_words(index: dict[str, Any]) -> str:
    words = [size(index["nbytes"]), f"built in {index['seconds']:.1f} s"]
    words += [f"{key} {value}" for key, value in (index["options"] | index["tuned"]).items() if value is not None]
    if index["quality"]:
        words.append(f"keeps {index['quality']['kept']:.2%} of the attention mass at k = {index['quality']['k']}")
    return ", ".join(words)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _parts_in_words(parts: dict[str, Any]) -> str:
    """``60 of float32 [3, 64] a token``: all layers have the same geometry, mostly."""
    kinds: Counter[str] = Counter()
    for spec in parts.values():
        what = "a token" if spec["every"] == 1 else f"for {spec['every']} tokens"
        kinds[f"{spec['dtype']} {list(spec['shape'])} {what}"] += 1
    return ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
