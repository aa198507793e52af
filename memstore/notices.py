"""Warnings that point at the line of the user's program which led to them."""

from __future__ import annotations

import sys

# What runs between a warning and the program: contextlib, where a context manager gives it as it is entered.
INSIDE = ("memstore", "memstore_adapters", "memstore_backends", "contextlib")


def outside() -> int:
    """The ``stacklevel`` by which a warning of whoever calls this points at the first caller outside of memstore."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    return level
