"""``memstore index``: read documents and keep what was read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from memstore import documents
from memstore.cli.common import (
    DtypeOption,
    JsonOption,
    ModelOption,
    StoreOption,
    complain,
    err,
    load_model,
    open_store,
    out,
    size,
    visible,
    write_json,
)
from memstore.errors import DocumentError, MemstoreError
from memstore.sources import refresh

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.store import MemoryStore
    from memstore.updating import Update


StoredAsOption = Annotated[
    Literal["float32", "float16", "bfloat16", "int8", "int4"] | None,
    typer.Option(
        "--stored-as",
        help="How vectors are kept; int8 and int4 for decoder-only models. Default: as the model computes.",
        show_default=False,
    ),
]


def index(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="Text files (UTF-8), folders, or - for standard input. A file is named by its name without suffix. "
            f"In a folder every {', '.join(documents.SUFFIXES)} file is read, named by its path without suffix; other "
            "files, hidden ones and folders, and links to folders are passed over.",
            show_default=False,
        ),
    ],
    model: ModelOption,
    store: StoreOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the memory, for a single file.", show_default=False)] = None,
    dtype: DtypeOption = "float32",
    stored_as: StoredAsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read documents with a model and keep what was read.

    Of a file that changed since, only what changed is read again.
    """
    if name is not None and (len(files) > 1 or Path(files[0]).is_dir()):
        raise typer.BadParameter("names a single file, not several.", param_hint="--name")
    found = documents.find(files)
    if name is not None:
        found = [documents.Document(name, found[0].path)]
    indexed: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []

    def fail(document: documents.Document, error: MemstoreError) -> None:
        message = about(document, error)
        complain(message)
        failed.append({"file": document.path, "error": message})

    with ExitStack() as stack:
        reader: tuple[PreTrainedModel, PreTrainedTokenizerBase, MemoryStore] | None = None
        for document in found:
            try:
                text = document.read()
            except DocumentError as error:
                fail(document, error)
                continue
            if reader is None:  # not before there is something to read: a typing mistake should cost no time
                reader = (*load_model(model, dtype), stack.enter_context(open_store(store, "a")))
            loaded, tokenizer, opened = reader
            try:
                with ReadingProgress(document.name) as progress:
                    update = refresh(opened, loaded, tokenizer, document, text, dtype=stored_as, progress=progress)
            except MemstoreError as error:
                fail(document, error)
                continue
            memory = update.memory
            facts = {"name": memory.name, "num_tokens": memory.num_tokens, "nbytes": memory.nbytes}
            counts = {"windows": update.num_windows, "reused": update.num_reused}
            indexed.append({**facts, **counts, "unchanged": update.unchanged})
            if not as_json:
                how = ", unchanged" if update.unchanged else reused(update)
                out.print(f"{memory.name}: {memory.num_tokens:,} tokens, {size(memory.nbytes)}{how}", soft_wrap=True)
    if as_json:
        write_json({"indexed": indexed, "failed": failed})
    if failed:
        if len(found) > 1:
            complain(f"{len(failed)} of {len(found)} documents could not be indexed.")
        raise typer.Exit(1)


def about(document: documents.Document, error: MemstoreError) -> str:
    """What went wrong with a document, which it names."""
    return str(error) if document.path in str(error) else f"{document.path}: {error}"


def reused(update: Update) -> str:
    """How much of a document need not be read, in words; nothing of one that was all read."""
    return f", {update.num_reused:,} of {update.num_windows:,} windows reused" if update.num_reused else ""


class ReadingProgress:
    """Shows how far the reading of one document is: a bar on a terminal, one line at the end elsewhere."""

    def __init__(self, name: str, get_time: Callable[[], float] = monotonic) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens{task.fields[pace]}"),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._name, self._get_time = name, get_time
        self._task = self.bar.add_task(visible(name), total=None, pace="")
        self._first: tuple[int, float] | None = None
        self._summary = ""

    def __enter__(self) -> ReadingProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if err.is_terminal:
            self.bar.stop()
        elif kind is None and self._summary:
            err.print(f"{self._name}: {self._summary}", soft_wrap=True)

    def __call__(self, done_tokens: int, total_tokens: int) -> None:
        now = self._get_time()
        if self._first is None:  # what an interrupted run had read already must not count as speed
            self._first = (done_tokens, now)
        tokens, seconds = done_tokens - self._first[0], now - self._first[1]
        pace = ""
        if tokens and seconds:
            speed = tokens / seconds
            left = timedelta(seconds=round((total_tokens - done_tokens) / speed))
            pace = f", {speed:,.0f} tokens/s, {left} left"
            self._summary = f"read {tokens:,} tokens in {seconds:.1f} s, {speed:,.0f} tokens/s"
        self.bar.update(self._task, total=total_tokens, completed=done_tokens, pace=pace)
