"""The demo's questions on two of its books: right with the memory and wrong without."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstore import demo

pytestmark = pytest.mark.real


def test_the_model_is_right_with_the_memory_and_wrong_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "BOOKS", ("Ruth", "Jonah"))
    monkeypatch.setattr(demo, "QUESTIONS", demo.QUESTIONS[:3])
    demo.main("read", str(tmp_path / "library"))
    results = list(demo.answers(tmp_path / "library"))
    assert len(results) == 3
    for result in results:
        assert result["in_the_text"] in result["with_memory"]
        assert result["in_the_text"] not in result["without_memory"]
        assert any(passage["verses"].startswith("Ruth") for passage in result["read"])
