"""What all commands share: options, output, errors."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

import memstore
from memstore import config, registry
from memstore.errors import ConfigError, IndexNotice, MemstoreError
from memstore.interfaces import RecordStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.interfaces import Mode
    from memstore.store import MemoryStore

P = ParamSpec("P")

# What moves the cursor, changes colours or turns the reading direction: none of it may come from a store.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters written as escapes, but for line ends and tabs."""
    text = text.replace("\r\n", "\n")
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Plain(Console):
    """A console that shows text as it is: a memory may well be named "[draft]"."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def status(self, status: Any, **options: Any) -> Status:
        return super().status(Text(visible(status)), **options)  # what is no Text would be read as markup


out = Plain()
err = Plain(stderr=True)

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="The store. Default: the configured one.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write exactly one JSON document to standard output.")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODEL", help="A hub name, a local directory, or a .gguf file.", show_default=False
    ),
]
DtypeOption = Annotated[
    Literal["float32", "float16", "bfloat16"],
    typer.Option("--dtype", help="What the model computes in. A memory is read in the dtype it was written in."),
]


def reporting(function: Callable[P, None]) -> Callable[P, None]:
    """A command, which must take ``as_json``, whose MemstoreError becomes one message and exit status 1."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", IndexNotice)
                warnings.showwarning = _show_warning
                function(*args, **kwargs)
        except MemstoreError as error:
            complain(str(error))
            if kwargs["as_json"]:
                write_json({"error": str(error)})
            raise typer.Exit(1) from error

    return run


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if issubclass(category, IndexNotice):
        note_that(str(message))
    else:
        err.print(warnings.formatwarning(message, category, *place[:2]), soft_wrap=True, end="")


@contextmanager
def logged(level: int) -> Iterator[None]:
    """Inside, what memstore and its plugins log from this level on is written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("memstore", "memstore_adapters", "memstore_backends")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(was)


def complain(message: str) -> None:
    """Write an error message to standard error."""
    err.print(Text.assemble(("Error: ", "bold red"), visible(message)), soft_wrap=True)


@contextmanager
def collected(failed: list[dict[str, str]], **what: str) -> Iterator[None]:
    """Of several things to do, one: if it fails, its error is told and added to ``failed`` with ``what`` it was, and
    the others are done all the same."""
    try:
        yield
    except MemstoreError as error:
        complain(str(error))
        failed.append({**what, "error": str(error)})


def note_that(message: str) -> None:
    """Write what is worth knowing to standard error."""
    err.print(Text.assemble(("Note: ", "bold"), visible(message)), soft_wrap=True)


def write_json(document: Any) -> None:
    """Write the one JSON document of a command."""
    typer.echo(json.dumps(document, indent=2))


def open_store(path: Path | None, mode: Mode) -> MemoryStore:
    """The store at ``path``, or the configured one. Raises ConfigError if nothing of it would outlast the command."""
    place, records = store_place(path)
    return memstore.open(place, mode, records=records)


def store_place(path: Path | None) -> tuple[Path, str]:
    """Where a store lies, and its record backend: see :func:`open_store`."""
    configured = config.load()
    records = configured.records()
    if not registry.load(registry.BACKENDS, records, RecordStore).persistent:
        raise ConfigError(
            f"store.records = {records!r} keeps nothing once a command has ended. Name a record backend that does; "
            "`memstore config show --origin` tells where this one was named."
        )
    return (path or configured.settings.store.path).resolve(), records


def load_model(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, without progress bars of their own on the terminal."""
    with err.status(f"Loading {name} …"):
        from transformers.utils import logging

        from memstore import models

        logging.disable_progress_bar()
        return models.load(name, dtype)


def size(num_bytes: int) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
