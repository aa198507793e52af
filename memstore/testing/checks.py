"""Saying which error was due."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], what: str) -> Iterator[None]:
    """What is done inside must raise ``error``; ``what`` describes it in the message if it does not."""
    due = error.__name__ if isinstance(error, type) else " or ".join(each.__name__ for each in error)
    try:
        yield
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{what}: {due} is due, but {type(other).__name__} was raised: {other}") from other
    raise AssertionError(f"{what}: {due} is due, but nothing was raised.")
