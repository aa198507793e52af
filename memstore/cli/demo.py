"""``memstore demo``: four books, read once in one process and answered from in another."""

from __future__ import annotations

from memstore.cli.common import JsonOption, StoreOption


def demo(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Read four books of the Bible with a small model, then answer from them in a new process."""
    from memstore.demo import run

    run(store, as_json)
