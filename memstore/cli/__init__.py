"""The command line. Nothing here loads torch before a model is needed."""

from __future__ import annotations

import io
import sys

import typer

from memstore.cli import demo, generate, index, library, plugins, reindex
from memstore.cli.common import reporting

app = typer.Typer(
    name="memstore",
    help="Read documents once with a transformer, keep what it read, and answer from it in any later process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("index")(reporting(index.index))
app.command("list")(reporting(library.list_memories))
app.command("show")(reporting(library.show))
app.command("remove")(reporting(library.remove))
app.command("verify")(reporting(library.verify))
app.command("reindex")(reporting(reindex.reindex))
app.command("generate")(reporting(generate.generate))
app.command("plugins")(reporting(plugins.plugins))
app.command("demo")(reporting(demo.demo))


def main() -> None:
    """The ``memstore`` command."""
    for stream in (sys.stdout, sys.stderr):  # a character the terminal lacks must not cost an answer
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
