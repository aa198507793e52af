"""TOML that is written reads back as what it was."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.toml import dotted, dumps
from tests.tables import tables


@settings(deadline=None)
@given(tables, st.data())
def test_a_document_reads_back_whatever_its_notes(table: dict[str, Any], data: st.DataObject) -> None:
    notes: dict[tuple[str, ...], str] = {(key,): data.draw(st.text(max_size=5)) for key in table}
    assert tomllib.loads(dumps(table)) == table
    assert tomllib.loads(dumps(table, notes)) == table


def test_notes_stand_behind_values_and_empty_tables() -> None:
    table = {"a": {"b": 1, "c": {}, "d": {"e f": [{"g": 1.5e-7}]}}}
    notes = {("a", "b"): "here", ("a", "c"): "a\nb", ("a", "d", "e f"): "C:\\[x]"}
    expected = """\
[a]
b = 1  # here

[a.c]  # "a\\nb"

[a.d]
"e f" = [{ g = 1.5e-07 }]  # C:\\[x]
"""
    assert dumps(table, notes) == expected


@pytest.mark.parametrize("text", ["\x7f\x00\n\t\"\\'", "é🙂", "a.b", ""])
def test_strings_and_keys(text: str) -> None:
    assert tomllib.loads(dumps({text: text, "t": {text: {"x": text}}})) == {text: text, "t": {text: {"x": text}}}
    assert tomllib.loads(f"{dotted(['x', text])} = 1") == {"x": {text: 1}}


def test_numbers_that_json_lacks() -> None:
    assert tomllib.loads(dumps({"x": float("inf"), "y": -float("inf")})) == {"x": float("inf"), "y": -float("inf")}
    assert dumps({"x": float("nan"), "y": True}) == "x = nan\ny = true\n"


def test_bytes_that_are_no_text_do_not_make_the_document_invalid() -> None:
    assert tomllib.loads(dumps({"path": "a\udcff"})) == {"path": "a?"}
