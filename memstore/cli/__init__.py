"""The command line. Nothing here loads torch before a model is needed."""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

import memstore
from memstore.cli import check, config, demo, exchange, generate, index, library, plugins, reindex, sync
from memstore.cli.common import logged, reporting
from memstore.config import command_line

app = typer.Typer(
    name="memstore",
    help="Read documents once with a transformer, keep what it read, and answer from it in any later process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memstore {memstore.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_version, is_eager=True)
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The profile of plugins.toml that configures the command.", show_default=False
        ),
    ] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, help="Say on standard error what is done; -vv also in detail.", metavar=""
        ),
    ] = 0,
) -> None:
    """What may stand before any command."""
    if verbose:
        context.with_resource(logged(logging.DEBUG if verbose > 1 else logging.INFO))
    if profile is not None:
        context.with_resource(command_line(profile))


app.command("index")(reporting(index.index))
app.command("sync")(reporting(sync.sync))
app.command("list")(reporting(library.list_memories))
app.command("show")(reporting(library.show))
app.command("remove")(reporting(library.remove))
app.command("verify")(reporting(library.verify))
app.command("export")(reporting(exchange.export))
app.command("import")(reporting(exchange.import_memories))
app.command("reindex")(reporting(reindex.reindex))
app.command("check")(reporting(check.check))
app.command("generate")(reporting(generate.generate))
app.command("plugins")(reporting(plugins.plugins))
app.command("demo")(reporting(demo.demo))
configuration = typer.Typer(help="Show what is configured.", no_args_is_help=True)
configuration.command("show")(reporting(config.show))
app.add_typer(configuration, name="config")


def main() -> None:
    """The ``memstore`` command."""
    for stream in (sys.stdout, sys.stderr):  # a character the terminal lacks must not cost an answer
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
