"""What is wrong with a setting or an option, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from memstore.config.layers import KeyPath
from memstore.config.sources import PREFIX

SINGLE = {"bool_type", "float_type", "int_type", "path_type", "string_type"}
LONGEST = 100  # characters of a value that are shown


def explanation(
    error: ValidationError,
    model: type[BaseModel],
    where: Callable[[KeyPath], str],
    elsewhere: Callable[[KeyPath], str] = lambda path: "",
    also: Sequence[str] = (),
) -> str:
    """One line for each thing that ``model`` found wrong.

    ``where`` names the place and the key to correct for a path into the model; ``elsewhere`` says what an unknown key
    would be right for, if anything; ``also`` are keys that may stand at the top beside those of the model.
    """

    def line(detail: Any) -> str:
        path: KeyPath = tuple(map(str, detail["loc"]))
        place = where(path)
        value = "" if detail["type"] == "missing" else f" = {shown(detail['input'])}"
        if detail["type"] == "extra_forbidden":
            known = [*_fields(model, path[:-1]), *(also if len(path) == 1 else ())]
            hint = elsewhere(path) or closest(path[-1], known) or f"known here: {', '.join(known) or 'nothing'}."
            wrong = f"there is no such key; {hint}"
        elif detail["type"] in ("dict_type", "model_type"):
            wrong = _table(place, _fields(model, path))
        elif detail["type"] in SINGLE and isinstance(detail["input"], dict):
            wrong = "must be a single value."
        else:
            wrong = detail["msg"].removeprefix("Value error, ").partition(" for <class")[0].rstrip(".") + "."
        return f"{place}{value}: {wrong}"

    return "\n".join(dict.fromkeys(map(line, error.errors())))


def _table(place: str, keys: Sequence[str]) -> str:
    variable = place.partition(":")[0]
    if variable.startswith(PREFIX):
        return f"must be a table: set {' or '.join(f'{variable}__{key.upper()}' for key in keys or ['NAME'])}."
    return f"must be a table{' with ' if keys else ''}{', '.join(keys)}."


def shown(value: object) -> str:
    """The value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def closest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'path'?``, or nothing."""
    known = list(known)
    close = difflib.get_close_matches(word.lower(), known, n=1) or [key for key in known if word and word in key]
    return f"did you mean {close[0]!r}?" if close else ""


def _fields(model: type[BaseModel], path: KeyPath) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
