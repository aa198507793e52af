"""``memstore generate``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memstore
from tests import kept, tiny
from tests.cli.conftest import Run


def test_the_answer_is_that_of_the_library(run: Run, library: Path, model: Path) -> None:
    arguments = [
        "generate",
        "--model",
        model,
        "--store",
        library,
        "--memory",
        "ruth[1]",
        "Who?",
        "--max-new-tokens",
        "8",
    ]
    document = json.loads(run(*arguments, "--json").stdout)
    llama, tokenizer = tiny.llama(), tiny.tokenizer()
    with memstore.open(library, "r") as store, memstore.attach(llama, store["ruth[1]"]) as attached:
        expected = attached.generate("Who?", tokenizer=tokenizer, max_new_tokens=8, num_beams=1)
    assert document == {"text": expected, "memories": ["ruth[1]"]}
    code = "from memstore.cli import main; main()"
    again = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, check=True)
    assert again.stdout.decode() == expected + "\n"


def test_several_memories_and_beams(run: Run, library: Path, model: Path) -> None:
    memories = ("--memory", "ruth[1]", "--memory", "genesis", "--memory", "ruth[1]")
    result = run(
        "generate",
        "--model",
        model,
        "--store",
        library,
        *memories,
        "Who?",
        "--max-new-tokens",
        4,
        "--num-beams",
        2,
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["memories"] == ["ruth[1]", "genesis"]


def test_a_pattern_stands_for_the_memories_it_fits(run: Run, library: Path, model: Path) -> None:
    memories = ("--memory", "ruth[1]", "--memory", "*e*", "--memory", "*")  # the first is a name, though also a pattern
    arguments = ("--model", model, "--store", library, *memories, "Who?", "--max-new-tokens", 1, "--json")
    assert json.loads(run("generate", *arguments).stdout)["memories"] == ["ruth[1]", "genesis"]
    result = run("generate", "--model", "/no/model", "--store", library, "--memory", "gospel-*", "Who?")
    assert result.exit_code == 1 and "no memory named 'gospel-*', and none whose name fits" in result.stderr
    result = run("generate", "--model", "/no/model", "--store", library, "--memory", "genesys", "Who?")
    assert result.exit_code == 1 and "no memory named 'genesys'. Did you mean 'genesis'?" in result.stderr


def test_explain_shows_the_passages_that_were_read(run: Run, library: Path, model: Path) -> None:
    arguments = ("generate", "--model", model, "--store", library, "--memory", "ruth[1]", "Who?", "--explain")
    passages = json.loads(run(*arguments, "--max-new-tokens", 4, "--json").stdout)["passages"]
    shares = [passage["share"] for passage in passages]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert passages[0]["document"] == "ruth[1]"
    assert passages[0]["text"].startswith("And Ruth said")
    text = run(*arguments, "--max-new-tokens", 4).stdout
    assert "% of attention: ruth[1], tokens 0–" in text
    assert "And Ruth said" in text


def test_explain_tells_each_token_by_layer_and_head_as_asked(run: Run, library: Path, model: Path) -> None:
    memories = ("--memory", "ruth[1]", "--memory", "genesis")
    arguments = (
        "generate",
        "--model",
        model,
        "--store",
        library,
        *memories,
        "Who?",
        "--max-new-tokens",
        3,
        "--explain",
    )
    told = json.loads(run(*arguments, "--heads", "each", "--layers", "max", "--json").stdout)
    llama, tokenizer = tiny.llama(), tiny.tokenizer()
    with memstore.open(library, "r") as store:
        names = ("ruth[1]", "genesis")
        with memstore.attach(llama, *(store[name] for name in names), explain=True) as attached:
            attached.generate("Who?", tokenizer=tokenizer, max_new_tokens=3, num_beams=1)
            expected = attached.provenance("each", "max")
            shares = {each.document: each.share for each in expected.documents()}
    assert {each["document"]: each["share"] for each in told["documents"]} == pytest.approx(shares)
    readings = [reading for token in told["tokens"] for reading in token["readings"]]
    assert [reading["mass"] for reading in readings] == pytest.approx([reading.mass for reading in expected])
    assert [reading["head"] for reading in readings] == [reading.head for reading in expected]
    assert [token["step"] for token in told["tokens"]] == [0, 1, 2]
    assert "".join(token["text"] for token in told["tokens"]).strip() == told["text"]
    shown = run(*arguments).stdout
    assert "heaviest passage" in shown and "of attention: genesis" in shown
    assert run(*arguments, "--heads", "median").exit_code == 2


def test_a_wrong_memory_is_told_before_the_model_is_loaded(run: Run, library: Path) -> None:
    result = run("generate", "--model", "/no/model", "--store", library, "--memory", "exodus", "Who?", "--json")
    assert result.exit_code == 1
    assert "'exodus'" in json.loads(result.stdout)["error"]


def test_another_model_is_refused(run: Run, library: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", seed=1)
    result = run("generate", "--model", other, "--store", library, "--memory", "genesis", "Who?")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "weights" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--memory", "m", "Who?"],
        ["--model", "m", "Who?"],
        ["--model", "m", "--memory", "m", "Who?", "--num-beams", "0"],
    ],
)
def test_wrong_usage_ends_with_2(run: Run, arguments: list[str]) -> None:
    assert run("generate", *arguments).exit_code == 2


def test_an_index_that_had_to_be_built_is_told_in_words(
    run: Run, library: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    arguments = ("--model", model, "--store", library, "--memory", "genesis", "Who?", "--max-new-tokens", 1)
    first = run("generate", *arguments, "--json")
    assert json.loads(first.stdout)["memories"] == ["genesis"]
    assert first.stderr.startswith("Note: The index 'kept' of memory 'genesis' was built in ")
    assert run("reindex", "genesis", "--store", library).exit_code == 0
    assert run("generate", *arguments).stderr == ""
