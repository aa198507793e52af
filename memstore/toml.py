"""Writing TOML, which the standard library only reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time
from typing import Any

KeyPath = tuple[str, ...]


def dotted(path: Sequence[object]) -> str:
    """A key as it is written in TOML: ``index.options."a.b"``."""
    return ".".join(key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else string(key) for key in map(str, path))


def string(text: str) -> str:
    """A basic string. What no Unicode text can hold (half of a surrogate pair) becomes a question mark."""
    quoted = json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)
    return quoted.replace("\x7f", "\\u007f")


def value(given: Any) -> str:
    """A value on one line; a mapping as an inline table."""
    match given:
        case bool():
            return str(given).lower()
        case int() | float():
            return repr(given)
        case date() | time():
            return given.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(value, given))}]"
        case Mapping():
            inside = ", ".join(f"{dotted([key])} = {value(each)}" for key, each in given.items())
            return f"{{ {inside} }}" if inside else "{}"
    return string(str(given))


def comment(text: str) -> str:
    """``# text``, in quotes if it has characters that a comment must not have."""
    return f"# {text if text.isprintable() else string(text)}"


def dumps(table: Mapping[str, Any], notes: Mapping[KeyPath, str] | None = None) -> str:
    """A document that reads back as ``table``. ``notes`` become comments behind the values, or the empty tables, that
    stand at these paths."""
    return "\n".join(_lines(table, notes or {}, ())).strip("\n") + "\n"


def _lines(table: Mapping[str, Any], notes: Mapping[KeyPath, str], path: KeyPath) -> Iterator[str]:
    tables = {key: each for key, each in table.items() if isinstance(each, Mapping)}
    values = {key: each for key, each in table.items() if key not in tables}
    if path and (values or not tables):
        yield f"\n[{dotted(path)}]" + _note(notes, path)
    for key, each in values.items():
        yield f"{dotted([key])} = {value(each)}" + _note(notes, (*path, key))
    for key, each in tables.items():
        yield from _lines(each, notes, (*path, key))


def _note(notes: Mapping[KeyPath, str], path: KeyPath) -> str:
    return f"  {comment(notes[path])}" if path in notes else ""
