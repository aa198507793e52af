"""The demo's two processes, with a tiny model in place of the real one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import memstore
from memstore import assets, demo
from memstore.errors import AssetError, MemoryExistsError
from tests import tiny


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two short books and a tiny model."""
    model = tiny.save(tmp_path / "model")
    monkeypatch.setattr(assets, "smollm2", lambda: model)
    monkeypatch.setattr(demo, "BOOKS", ("Obadiah", "Jonah"))
    return tmp_path / "library"


def test_one_process_reads_and_another_answers(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    demo.main("read", str(small))
    demo.main("read", str(small))
    assert "read in an earlier run" in capfd.readouterr().out
    with memstore.open(small, mode="r") as store:
        assert store.names() == ["Jonah", "Obadiah"]
    demo.main("answer", str(small), "--json")
    results = json.loads(capfd.readouterr().out)
    assert [result["question"] for result in results] == [question.text for question in demo.QUESTIONS]
    for result in results:
        assert len(result["read"]) == demo.MOST_PASSAGES
        for passage in result["read"]:
            assert 0 < passage["share"] < 1
            assert passage["verses"].split()[0] in ("Obadiah", "Jonah")
            assert passage["text"] in assets.book_text(passage["verses"].split()[0])[0]
    demo.main("answer", str(small))
    shown = capfd.readouterr().out
    assert all(question.text in shown for question in demo.QUESTIONS) and results[0]["read"][0]["verses"] in shown


def test_a_process_that_fails_ends_the_demo_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(AssetError, match=r"memstore\.demo read"):
        demo.run(tmp_path / "library", as_json=False)
    message = capfd.readouterr().err
    assert "Set MEMSTORE_CACHE" in message or "set MEMSTORE_CACHE" in message
    assert "Traceback" not in message


def test_what_a_model_writes_is_shown_as_it_is() -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    passage = {"share": 0.5, "verses": "Jonah 1:1", "text": "the [bold] word"}
    result = {
        "question": "Who?",
        "without_memory": "[/] none",
        "with_memory": "[red]",
        "in_the_text": "Jonah",
        "read": [passage],
    }
    demo.show(result, console)
    shown = console.export_text()
    assert all(text in shown for text in ("[/] none", "[red]", "the [bold] word"))


def test_what_an_earlier_version_read_is_read_anew_in_the_demos_own_store_alone(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main("read", str(small))
    monkeypatch.setattr("memstore.families.DecoderOnlyAdapter.DEFAULT_WINDOW", 512)
    with pytest.raises(MemoryExistsError, match="differs in rule"):
        demo.main("read", str(small))
    monkeypatch.setattr(demo, "default_store", lambda: small)
    demo.main("read", str(small))
    with memstore.open(small, mode="r") as store:
        assert {memory.manifest.rule.window for memory in store.memories()} == {512}
