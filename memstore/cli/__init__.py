"""The command line. Nothing here loads torch before a model is needed."""

from __future__ import annotations

from memstore.cli.app import app
from memstore.cli.generate import generate
from memstore.cli.index import index
from memstore.cli.library import list_memories, remove, show, verify
from memstore.cli.plugins import plugins

__all__ = ["app", "generate", "index", "list_memories", "main", "plugins", "remove", "show", "verify"]


def main() -> None:
    """The ``memstore`` command."""
    app()
