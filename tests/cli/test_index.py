"""``memstore index``."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import memstore
from memstore import documents
from memstore.cli import index
from memstore.errors import DocumentError
from memstore.memory_writer import token_parts
from tests.cli.conftest import GENESIS, Run


def names(store: Path) -> list[str]:
    with memstore.open(store, "r") as opened:
        return opened.names()


def test_a_folder_is_walked_and_text_is_kept_exactly(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    result = run("index", folder, "--model", model, "--store", tmp_path / "store")
    assert result.exit_code == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["genesis", "letters/first"]
    with memstore.open(tmp_path / "store", "r") as store:
        assert store.names() == ["genesis", "letters/first"]
        assert store["genesis"].text == GENESIS
        assert store["letters/first"].text == "Dear [b]Ruth[/b], 你好 🙂"


def test_a_single_file_is_named_by_its_stem_or_by_name(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    common = ("--model", model, "--store", tmp_path / "store")
    assert run("index", folder / "letters" / "first.md", *common).exit_code == 0
    assert run("index", folder / "letters" / "first.md", *common, "--name", "a letter").exit_code == 0
    assert names(tmp_path / "store") == ["a letter", "first"]


def test_standard_input(run: Run, model: Path, tmp_path: Path) -> None:
    result = run("index", "-", "--model", model, "--store", tmp_path, "--name", "piped", stdin=b"one\r\ntwo\x00")
    assert result.exit_code == 0, result.stderr
    with memstore.open(tmp_path, "r") as store:
        assert store["piped"].text == "one\r\ntwo\x00"


def test_json_is_one_document(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    (folder / "bad.txt").write_bytes(b"abc\xff")
    result = run("index", folder, "--model", model, "--store", tmp_path / "store", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(m["name"], m["num_tokens"]) for m in document["indexed"]] == [
        ("genesis", len(GENESIS.encode())),
        ("letters/first", len("Dear [b]Ruth[/b], 你好 🙂".encode())),
    ]
    assert [failure["file"] for failure in document["failed"]] == [str(folder / "bad.txt")]


def test_one_failing_file_does_not_stop_the_others(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    (folder / "bad.txt").write_bytes("é".encode() + b"abc\xff")
    (folder / "empty.txt").write_bytes(b"")
    result = run("index", folder, folder / "nowhere.txt", "--model", model, "--store", tmp_path / "store")
    assert result.exit_code == 1
    assert f"{folder / 'bad.txt'} is not UTF-8: byte 0xff at offset 5" in result.stderr
    assert f"{folder / 'empty.txt'}: " in result.stderr
    assert f"{folder / 'nowhere.txt'} cannot be read: No such file or directory." in result.stderr
    assert "3 of 5 documents could not be indexed." in result.stderr
    assert names(tmp_path / "store") == ["genesis", "letters/first"]


def test_a_changed_file_is_read_again_and_the_same_again_is_not(
    run: Run, folder: Path, model: Path, tmp_path: Path
) -> None:
    long = "".join(np.random.default_rng(0).choice(list("abcdefgh ,."), 12_000))
    (folder / "genesis.txt").write_text(long)
    command = ("index", folder / "genesis.txt", "--model", model, "--store", tmp_path / "store")
    assert "reused" not in run(*command).stdout
    (folder / "genesis.txt").write_text(long[:6000] + "inserted" + long[6000:])
    (facts,) = json.loads(run(*command, "--json").stdout)["indexed"]
    assert facts["num_tokens"] == 12_008 and 0 < facts["reused"] < facts["windows"]
    result = run(*command)
    assert result.stdout.endswith(", unchanged\n") and result.stdout.count("\n") == 1 and "read" not in result.stderr
    (again,) = json.loads(run(*command, "--json").stdout)["indexed"]
    assert again == {**facts, "reused": facts["windows"], "unchanged": True} and not facts["unchanged"]
    with memstore.open(tmp_path / "store", "r") as store:
        assert store["genesis"].text == long[:6000] + "inserted" + long[6000:]
        assert store["genesis"].metadata == {"source": str(folder / "genesis.txt")}


def test_another_file_of_the_same_name_is_refused(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    common = ("--model", model, "--store", tmp_path / "store")
    assert run("index", folder / "genesis.txt", *common).exit_code == 0
    (tmp_path / "genesis.txt").write_bytes(GENESIS.encode())
    assert run("index", tmp_path / "genesis.txt", *common).exit_code == 0  # the same text
    (tmp_path / "genesis.txt").write_text("In the end.")
    for path, stdin in ((tmp_path / "genesis.txt", None), ("-", b"In the end.")):
        result = run("index", path, *common, "--name", "genesis", stdin=stdin)
        assert result.exit_code == 1
        assert "'genesis'" in result.stderr and str(folder / "genesis.txt") in result.stderr.replace("\n", "")
    with memstore.open(tmp_path / "store", "r") as store:
        assert store["genesis"].text == GENESIS


@pytest.mark.parametrize("files", [["a.txt", "b.txt"], ["."]])
def test_name_is_for_a_single_file(run: Run, files: list[str], model: Path) -> None:
    result = run("index", *files, "--model", model, "--name", "x")
    assert result.exit_code == 2
    assert "--name" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["index"], ["index", "a.txt"], ["index", "a.txt", "--model", "m", "--dtype", "int8"]]
)
def test_wrong_usage_ends_with_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_documents_of_one_name_are_refused_before_the_model_is_loaded(run: Run, folder: Path) -> None:
    (folder / "genesis.md").write_text("another")
    result = run("index", folder, "--model", "/no/model")
    assert result.exit_code == 1
    assert "would both be named 'genesis'. Rename one of them, or index them one by one, each with --name." in (
        result.stderr
    )


def test_a_folder_without_text_files_is_an_error(run: Run, tmp_path: Path) -> None:
    result = run("index", tmp_path, "--model", "/no/model", "--json")
    assert result.exit_code == 1
    assert "holds no text file (.md, .rst, .text, .txt)" in json.loads(result.stdout)["error"]


def test_a_missing_file_is_told_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    result = run("index", tmp_path / "nowhere.txt", "--model", "/no/model", "--store", tmp_path / "store")
    assert result.exit_code == 1
    assert result.stderr.count("Error:") == 1
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800.txt"])
def test_a_path_that_no_file_can_have_is_an_error_of_its_own(run: Run, path: str) -> None:
    result = run("index", path, "--model", "/no/model")
    assert result.exit_code == 1
    assert "cannot be read: " in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_what_must_not_be_read_is_an_error_and_not_left_out(run: Run, folder: Path, mode: int) -> None:
    (folder / "letters").chmod(mode)
    try:
        for path in (folder, folder / "letters" / "first.md"):
            result = run("index", path, "--model", "/no/model")
            assert result.exit_code == 1
            assert "cannot be read: Permission denied." in result.stderr
    finally:
        (folder / "letters").chmod(0o755)


def test_what_of_a_folder_is_passed_over_is_counted(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "memstore")
    (folder / "letters" / ".first.md.swp").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert [document.name for document in documents.find([str(folder)])] == ["genesis", "letters/first"]
    # picture.png and .first.md.swp; .hidden and link
    passed = "2 files that are hidden or have other suffixes, and 2 folders that are hidden or links"
    assert caplog.messages == [f"{folder}: passed over {passed}"]
    caplog.clear()
    documents.find([str(folder / "genesis.txt")])
    (folder / "letters" / ".first.md.swp").unlink()
    documents.find([str(folder / "letters")])
    assert caplog.messages == []


def test_the_dtype_is_what_differs_in_a_memory_that_is_kept_otherwise(
    run: Run, folder: Path, model: Path, tmp_path: Path
) -> None:
    common = (folder / "genesis.txt", "--model", model, "--store", tmp_path / "store")
    assert run("index", *common).exit_code == 0
    result = run("index", *common, "--stored-as", "int8")
    assert result.exit_code == 1
    assert "it differs in dtype (stored as float32, not int8). Remove it first" in result.stderr


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DocumentError, match="standard input is closed"):
        documents.Document("stdin", "-").read()


def test_a_model_that_cannot_be_loaded_leaves_no_store(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("index", folder, "--model", tmp_path / "nowhere", "--store", tmp_path / "store")
    assert result.exit_code == 1
    assert "Cannot load the model" in result.stderr
    assert not (tmp_path / "store").exists()


def test_the_configured_store_is_the_default(
    run: Run, folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE__STORE__PATH", str(tmp_path / "configured"))
    assert run("index", folder / "genesis.txt", "--model", model).exit_code == 0
    assert names(tmp_path / "configured") == ["genesis"]


@pytest.fixture
def seconds() -> Callable[[], float]:
    """A clock that goes on by one second each time it is read."""
    return itertools.count(0.0).__next__


def test_a_terminal_sees_a_bar_with_tokens_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(index, "err", Console(file=shown, force_terminal=True, width=120, color_system=None))
    with index.ReadingProgress("genesis [1]", seconds) as progress:
        for done in (500, 1000, 1500):
            progress(done, 90_500)
        progress.bar.refresh()
    assert "genesis [1] " in shown.getvalue()
    assert "1500/90500 tokens, 500 tokens/s, 0:02:58 left" in shown.getvalue()


def test_elsewhere_one_line_tells_what_was_read_now(
    seconds: Callable[[], float], capsys: pytest.CaptureFixture[str]
) -> None:
    with index.ReadingProgress("genesis", seconds) as progress:
        progress(1000, 4000)  # an interrupted run had read these
        progress(4000, 4000)
    assert capsys.readouterr().err == "genesis: read 3,000 tokens in 1.0 s, 3,000 tokens/s\n"


def test_vectors_are_kept_as_asked(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    """Whatever the model computes in."""
    common = ("--model", model, "--store", tmp_path / "store")
    sizes = {}
    for kept in ("float32", "float16", "int8", "int4"):
        result = run("index", folder / "genesis.txt", *common, "--name", kept, "--stored-as", kept)
        assert result.exit_code == 0, result.stderr
        with memstore.open(tmp_path / "store", "r") as store:
            assert {spec.dtype for spec in token_parts(store[kept].manifest).values()} == {kept}
            sizes[kept] = store[kept].manifest.vector_bytes
    assert sizes["float32"] > sizes["float16"] > sizes["int8"] > sizes["int4"]
    result = run("generate", "--model", model, "--store", tmp_path / "store", "--memory", "int8", "Who?")
    assert result.exit_code == 0, result.stderr
