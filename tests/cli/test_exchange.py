"""``memstore export`` and ``memstore import``."""

from __future__ import annotations

import json
from pathlib import Path

import memstore
from memstore.exchange import folder_name
from tests.cli.conftest import GENESIS, Run
from tests.store import making


def test_memories_go_from_store_to_store(run: Run, library: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    result = run("export", "ruth[1]", "gen*", out, "--store", library)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [f"{name}: {out / folder_name(name)}" for name in ("ruth[1]", "genesis")]
    result = run("import", out, "--store", other)
    assert result.exit_code == 0, result.stderr
    assert sorted(line.split(":")[0] for line in result.stdout.splitlines()) == ["genesis", "ruth[1]"]
    again = run("import", out, "--store", other).stdout.splitlines()
    assert sorted(again) == sorted(f"{line}, is there already" for line in result.stdout.splitlines())
    assert [
        each["already"] for each in json.loads(run("import", out, "--store", other, "--json").stdout)["imported"]
    ] == [
        True,
        True,
    ]
    with memstore.open(other, "r") as store, memstore.open(library, "r") as before:
        assert store.names() == ["genesis", "ruth[1]"] and store["genesis"].text == GENESIS
        assert store["genesis"].manifest.digest == before["genesis"].manifest.digest
        assert all(result.ok for result in store.verify())


def test_what_fits_nothing_does_not_keep_the_others(run: Run, library: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("export", "gospel-*", "genesis", "exodus", "gen*", out, "--store", library, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, [each["name"] for each in document["exported"]]) == (1, ["genesis"])
    assert [each["name"] for each in document["failed"]] == ["gospel-*", "exodus"]
    assert (out / folder_name("genesis") / "manifest.json").is_file()


def test_json_is_one_document(run: Run, library: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = json.loads(run("export", "*", out, "--store", library, "--json").stdout)
    assert document["failed"] == [] and [each["name"] for each in document["exported"]] == ["genesis", "ruth[1]"]
    folder = Path(document["exported"][0]["folder"])
    (folder / "text.txt").write_text("In the end.")
    result = run("import", out, "--store", tmp_path / "other", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [each["name"] for each in document["imported"]] == ["ruth[1]"]
    assert [each["folder"] for each in document["failed"]] == [str(folder)] and "is damaged" in result.stderr


def test_what_is_not_there_is_an_error_and_leaves_nothing(run: Run, library: Path, tmp_path: Path) -> None:
    result = run("export", "exodus", tmp_path / "out", "--store", library)
    assert result.exit_code == 1 and "no memory named 'exodus'" in result.stderr
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "nowhere", library, tmp_path / "file"):
        result = run("import", folder, "--store", tmp_path / "other")
        assert result.exit_code == 1 and str(folder) in result.stderr.replace("\n", "")
        assert "Errno" not in result.stderr and "Name the folder that `memstore export` wrote to" in result.stderr
    assert run("export", "*", tmp_path / "file", "--store", library).exit_code == 1
    assert run("export", "genesis").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "library"]


NAMES = ["[/b]", "\x1b[2J\x1b[31mred", "\u202etxt.exe", "bell\a", "csi\x9b2J"]


def test_what_a_store_holds_neither_breaks_nor_steers_the_terminal(run: Run, tmp_path: Path) -> None:
    path, out, other = tmp_path / "store", tmp_path / "[/out]", tmp_path / "other"
    with memstore.open(path) as store:
        for name in NAMES:
            making.write(store, name)
    said = [
        run("list", "--store", path),
        run("show", NAMES[1], "--store", path),
        run("verify", "--store", path),
        run("export", "*", out, "--store", path),
        run("import", out, "--store", other),
        run("reindex", NAMES[0], "--store", path, "--backend", "exact"),
        run("remove", *NAMES, "\x1b[31mmissing", "--store", path),
    ]
    assert [result.exit_code for result in said] == [0, 0, 0, 0, 0, 1, 1]  # a memory without states has no index
    assert "parts that are not those of encoder states" in said[5].stderr
    for result in said:
        assert not {"\x1b", "\u202e", "\a", "\x9b"} & set(result.stdout + result.stderr)
    assert "\\x1b[2J\\x1b[31mred" in said[0].stdout and "\\x1b[31mmissing" in said[-1].stderr
    with memstore.open(other, "r") as store:
        assert store.names() == sorted(NAMES)
