"""``memstore sync``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgpack
import pytest

import memstore
from memstore import noting, sources
from memstore.catalog import SEALED, key
from memstore.manifest import FORMAT_MINOR
from tests.cli.conftest import GENESIS, Run
from tests.store import making


@pytest.fixture
def sync(run: Run, folder: Path, model: Path, tmp_path: Path) -> Any:
    """Run sync of the folder; gives its JSON document."""

    def sync(*options: object, expect: int = 0) -> dict[str, Any]:
        result = run("sync", folder, "--model", model, "--store", tmp_path / "store", "--json", *options)
        assert result.exit_code == expect, result.stderr
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    return sync


def names(facts: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in facts]


def texts(store: Path) -> dict[str, str | None]:
    with memstore.open(store, "r") as opened:
        return {memory.name: memory.text for memory in opened.memories()}


def test_a_folder_is_kept_up_with(sync: Any, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    plan = sync("--dry-run")
    assert names(plan["added"]) == ["genesis", "letters/first"] and plan["dry_run"] and not store.exists()
    assert names(sync()["added"]) == ["genesis", "letters/first"]
    done = sync()
    assert (done["added"], done["changed"], done["removed"]) == ([], [], [])
    assert done["unchanged"] == ["genesis", "letters/first"]
    (folder / "genesis.txt").write_bytes(GENESIS.encode() + b"The end.")
    shutil.rmtree(folder / "letters")
    (folder / "exodus.txt").write_text("These are the names.")
    before = texts(store)
    plan = sync("--dry-run")
    assert (names(plan["added"]), names(plan["changed"])) == (["exodus"], ["genesis"])
    assert plan["removed"] == ["letters/first"] and texts(store) == before
    done = sync()
    assert {key: names(done[key]) for key in ("added", "changed")} == {"added": ["exodus"], "changed": ["genesis"]}
    assert (done["removed"], done["failed"]) == (["letters/first"], [])
    assert texts(store) == {"exodus": "These are the names.", "genesis": GENESIS + "The end."}


def test_only_what_sync_of_this_folder_made_is_removed_or_replaced(
    run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path
) -> None:
    common = ("--model", model, "--store", tmp_path / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ruth.txt").write_text("Whither thou goest.")
    (tmp_path / "other" / "exodus.txt").write_text("These are the names.")
    assert run("sync", tmp_path / "other", *common).exit_code == 0
    assert run("index", folder / "genesis.txt", *common).exit_code == 0
    (folder / "exodus.txt").write_text("Another book of this name.")
    (folder / "genesis.txt").rename(tmp_path / "genesis.txt")
    done = sync(expect=1)
    assert names(done["added"]) == ["letters/first"] and done["removed"] == []  # it was indexed, not synchronised
    assert names(done["failed"]) == ["exodus"]
    error = done["failed"][0]["error"]
    assert str(tmp_path / "other" / "exodus.txt") in error and "--moved-from" not in error
    for before in (tmp_path / "other", tmp_path):  # which are where they were
        error = sync("--moved-from", before, expect=1)["error"]
        assert f"{before} is still there" in error
    assert sorted(texts(tmp_path / "store")) == ["exodus", "genesis", "letters/first", "ruth"]
    (folder / "exodus.txt").unlink()
    assert sync()["removed"] == []
    (tmp_path / "genesis.txt").rename(folder / "genesis.txt")
    assert sync()["unchanged"] == ["genesis", "letters/first"]
    (folder / "genesis.txt").unlink()  # whose memory sync has taken in meanwhile
    assert sync()["removed"] == ["genesis"]
    assert sorted(texts(tmp_path / "store")) == ["exodus", "letters/first", "ruth"]


def test_a_folder_that_has_moved_is_kept_up_with_where_it_is(
    run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path
) -> None:
    (folder / "exodus.txt").write_text("These are the names.")
    sync()
    moved, store = tmp_path / "moved", tmp_path / "store"
    folder.rename(moved)
    (moved / "genesis.txt").write_text("In the end.")
    (moved / "exodus.txt").unlink()
    command = ("sync", moved, "--model", model, "--store", store, "--json")
    done = json.loads(run(*command).stdout)
    assert (names(done["failed"]), done["removed"]) == (["genesis"], [])
    assert f"--moved-from {folder}" in done["failed"][0]["error"]
    assert run(*command, "--moved-from", "").exit_code == 2
    with memstore.open(store, "r") as opened:
        before = {memory.name: memory.manifest for memory in opened.memories()}
    for options in (("--dry-run",), ()):
        done = json.loads(run(*command, "--moved-from", folder, *options).stdout)
        assert (names(done["changed"]), done["removed"], done["failed"]) == (["genesis"], ["exodus"], [])
    assert texts(store) == {"genesis": "In the end.", "letters/first": (moved / "letters/first.md").read_text()}
    with memstore.open(store) as opened:
        metadata = {"folder": str(moved), "source": str(moved / "letters/first.md")}
        manifest = opened["letters/first"].manifest
        assert manifest == before["letters/first"].model_copy(update={"metadata": metadata})
        assert opened.verify(repair=True)[0].ok
    (moved / "genesis.txt").unlink()
    assert json.loads(run(*command).stdout)["removed"] == ["genesis"]


@pytest.mark.parametrize("command", ["sync", "index"])
@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_a_memory_that_cannot_be_opened_is_read_again(
    run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path, harm: str, command: str
) -> None:
    sync()
    with memstore.open(tmp_path / "store") as store:
        memory = store["genesis"]
        before, data = making.contents(memory), store.path / "memories" / memory.manifest.id / "data.mdb"
        digest = memory.manifest.digest
    if harm == "missing":
        data.unlink()
    else:
        os.truncate(data, 8192)
    if command == "sync":
        assert names(sync("--dry-run")["changed"]) == ["genesis"]
        assert sync()["changed"] == [{"name": "genesis", "windows": 3, "reused": 0}]
        assert sync()["unchanged"] == ["genesis", "letters/first"]
    else:
        assert run("index", folder / "genesis.txt", "--model", model, "--store", tmp_path / "store").exit_code == 0
    with memstore.open(tmp_path / "store") as store:
        assert store["genesis"].manifest.digest == digest and making.contents(store["genesis"]) == before
        assert store["genesis"].metadata["folder"] == str(folder)
        assert len(store.records.memory_ids()) == 2


def test_a_file_that_cannot_be_read_is_not_gone(sync: Any, folder: Path, tmp_path: Path) -> None:
    sync()
    (folder / "genesis.txt").write_bytes(b"abc\xff")
    done = sync(expect=1)
    assert names(done["failed"]) == ["genesis"] and "not UTF-8" in done["failed"][0]["error"]
    assert texts(tmp_path / "store")["genesis"] == GENESIS
    (folder / "genesis.txt").rename(folder / "genesis.md")  # another file, the same document
    (folder / "genesis.md").write_text("In the end.")
    assert names(sync()["changed"]) == ["genesis"]
    assert texts(tmp_path / "store")["genesis"] == "In the end."


def test_what_stands_in_the_place_of_a_text_is_not_read_and_the_text_not_gone(
    sync: Any, folder: Path, tmp_path: Path
) -> None:
    """It may only be that the disk is not mounted that a link leads to."""
    (folder / "genesis.txt").rename(tmp_path / "real.txt")
    (folder / "genesis.txt").symlink_to(tmp_path / "real.txt")
    sync()
    (tmp_path / "real.txt").rename(tmp_path / "away.txt")
    (folder / "letters").rename(tmp_path / "letters")
    (folder / "letters").symlink_to(tmp_path / "letters")
    os.mkfifo(folder / "pipe.txt")  # which nobody writes to
    (folder / "loop.txt").symlink_to("loop.txt")
    done = sync(expect=1)
    assert (done["removed"], done["unchanged"], done["added"], done["changed"]) == ([], [], [], [])
    errors = {each["name"]: each["error"] for each in done["failed"]}
    assert errors.keys() == {"genesis", "letters/first", "pipe", "loop"}
    assert "No such file" in errors["genesis"] and "no plain file" in errors["pipe"]
    assert f"{folder / 'letters'} has become a link" in errors["letters/first"]
    assert sorted(texts(tmp_path / "store")) == ["genesis", "letters/first"]
    for path in (folder / "letters", folder / "genesis.txt", folder / "pipe.txt", folder / "loop.txt"):
        path.unlink()
    (folder / "exodus.txt").write_text("These are the names.")
    assert sorted(sync()["removed"]) == ["genesis", "letters/first"]


def test_a_folder_may_be_named_by_a_link(run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path) -> None:
    sync()
    (tmp_path / "link").symlink_to(folder)
    shutil.rmtree(folder / "letters")
    result = run("sync", tmp_path / "link", "--model", model, "--store", tmp_path / "store", "--json")
    assert json.loads(result.stdout)["removed"] == ["letters/first"]


def test_what_changed_while_a_model_read_is_not_removed(
    sync: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync()
    first = folder / "letters" / "first.md"
    first.rename(tmp_path / "first.md")
    (folder / "letters" / "picture.png").touch()
    (folder / "exodus.txt").write_text("These are the names.")
    read = sources.refresh

    def refresh(*arguments: Any, **options: Any) -> Any:
        (tmp_path / "first.md").rename(first)
        return read(*arguments, **options)

    monkeypatch.setattr("memstore.cli.sync.refresh", refresh)
    done = sync()
    assert (names(done["added"]), done["removed"]) == (["exodus"], [])
    assert sorted(texts(tmp_path / "store")) == ["exodus", "genesis", "letters/first"]


def test_what_goes_wrong_names_the_file(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    (folder / "empty.txt").touch()
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt"))).write_text("No name.")
    result = run("sync", folder, "--model", model, "--store", tmp_path / "store")
    assert result.exit_code == 1 and f"Error: {folder / 'empty.txt'}: The document is empty" in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if "cannot be a name" in line)
    assert line.startswith(f"Error: {folder}")


def test_no_folder_at_all_is_not_the_current_one(run: Run, model: Path, tmp_path: Path) -> None:
    result = run("sync", "", "--model", model, "--store", tmp_path / "store")
    assert result.exit_code == 1 and "names no file" in result.stderr


def test_an_empty_or_missing_folder_removes_nothing(sync: Any, folder: Path, tmp_path: Path) -> None:
    """It may only be that its disk is not mounted."""
    sync()
    folder.rename(tmp_path / "elsewhere")
    assert "is no folder" in sync(expect=1)["error"]
    folder.mkdir()
    error = sync(expect=1)["error"]
    assert "holds no text file" in error and "Nothing is removed; `memstore remove` removes" in error
    assert sorted(texts(tmp_path / "store")) == ["genesis", "letters/first"]


def test_a_folder_that_became_empty_may_be_one_whose_disk_is_not_mounted(
    sync: Any, folder: Path, tmp_path: Path
) -> None:
    sync()
    (folder / "letters" / "first.md").unlink()
    for options in (("--dry-run",), ()):
        done = sync(*options, expect=1)
        assert done["removed"] == [] and names(done["failed"]) == ["letters/first"]
        assert f"{folder / 'letters'} is empty" in done["failed"][0]["error"]
    assert sorted(texts(tmp_path / "store")) == ["genesis", "letters/first"]
    (folder / "letters").rmdir()
    assert sync()["removed"] == ["letters/first"]


def test_another_stored_dtype_than_asked_for_is_told(sync: Any, folder: Path) -> None:
    sync()
    sync("--stored-as", "float32")
    (folder / "genesis.txt").write_text("In the end.")
    for options in (("--dry-run",), ()):
        done = sync("--stored-as", "float16", *options, expect=1)
        assert done["unchanged"] == [] and "stored as float32, not float16" in done["failed"][0]["error"]
    assert names(done["failed"]) == ["genesis", "letters/first"]


def test_what_was_begun_of_a_text_that_is_gone_is_removed(sync: Any, folder: Path, tmp_path: Path) -> None:
    sync()
    with memstore.open(tmp_path / "store") as store:
        metadata = {"folder": str(folder.resolve())}
        store.create(making.manifest("begun", metadata=metadata), making.document()).close()
        store.create(making.manifest("elsewhere"), making.document()).close()
    assert sync("--dry-run")["removed"] == ["begun"]
    assert sync()["removed"] == ["begun"]
    with memstore.open(tmp_path / "store") as store:
        assert [each.name for each in store.unfinished()] == ["elsewhere"]
        assert len(store.records.memory_ids()) == 3


def test_an_update_that_is_not_wanted_after_all_is_given_up(
    run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path
) -> None:
    sync()
    common = ("--store", tmp_path / "store")
    for command in ("sync", "index"):
        with memstore.open(tmp_path / "store") as store:
            old = store["genesis"].manifest
            store.create(making.manifest("genesis", metadata=old.metadata), making.document(), old).close()
        listed = run("list", *common)
        assert "Unfinished updates: genesis. The earlier version is there" in listed.stderr
        assert "memstore remove" not in listed.stderr and "genesis" in listed.stdout
        if command == "sync":
            assert sync()["unchanged"] == ["genesis", "letters/first"]
        else:
            assert run("index", folder / "genesis.txt", "--model", model, *common).exit_code == 0
        with memstore.open(tmp_path / "store") as store:
            assert store.unfinished() == [] and store["genesis"].manifest == old
            assert len(store.records.memory_ids()) == 2


def test_an_unfinished_update_does_not_make_a_memory_one_of_the_folder(
    run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path
) -> None:
    (folder / "ruth.txt").write_text("Whither thou goest.")
    assert run("index", folder / "ruth.txt", "--model", model, "--store", tmp_path / "store").exit_code == 0
    with memstore.open(tmp_path / "store") as store:
        draft = making.manifest("ruth", metadata={"folder": str(folder)})
        store.create(draft, making.document(), store["ruth"].manifest).close()
    (folder / "ruth.txt").unlink()
    assert sync()["removed"] == []
    assert "ruth" in texts(tmp_path / "store")


def test_odd_places_are_kept_apart(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named as standard input is, two whose names differ in a byte that is no text, and links to one file."""
    monkeypatch.chdir(tmp_path)
    names_ = ["-", "A\\xff", os.fsdecode(b"A\xff"), "G", "H"]
    for number, name in enumerate(names_):
        Path(name).mkdir()
        Path(name, f"text-{number}.txt").write_text(f"The text {number}.")
    for name in ("G", "H"):
        Path(name, "both.txt").symlink_to(tmp_path / "-" / "text-0.txt")

    def sync(name: str, *options: str) -> dict[str, Any]:
        result = run("sync", "--model", model, "--store", "store", "--json", *options, "--", name)
        done: dict[str, Any] = json.loads(result.stdout)
        return done

    for number, name in enumerate(names_):
        added = names(sync(name)["added"])
        assert added == ([f"text-{number}"] if name != "G" else ["both", "text-3"])
    for name in names_:
        assert sync(name)["removed"] == []
    Path("H", "both.txt").unlink()
    assert sync("H")["removed"] == []
    assert "both" in texts(tmp_path / "store")


def test_a_link_may_lie_where_the_folder_was(run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path) -> None:
    sync()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    (tmp_path / "moved" / "genesis.txt").write_text("In the end.")
    shutil.rmtree(tmp_path / "moved" / "letters")
    command = ("sync", tmp_path / "moved", "--model", model, "--store", tmp_path / "store", "--json")
    done = json.loads(run(*command, "--moved-from", folder).stdout)
    assert (names(done["changed"]), done["removed"]) == (["genesis"], ["letters/first"])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "moved" / "genesis.txt").rename(tmp_path / "moved" / "exodus.txt")
    result = run(*command, "--moved-from", tmp_path / "loop")
    assert result.exit_code == 1 and "cannot be the path of a text or a folder" in json.loads(result.stdout)["error"]


def test_metadata_of_others_may_be_anything(sync: Any, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "store") as store:
        for number, value in enumerate((["x"], {"a": 1}, None, 3.5)):
            making.write(store, f"other-{number}", metadata={"folder": value, "source": value})
    sync()
    assert len(texts(tmp_path / "store")) == 6 and sync()["removed"] == []


def test_a_memory_stays_in_the_dtype_it_is_stored_in(sync: Any, folder: Path, tmp_path: Path) -> None:
    sync("--stored-as", "float16")
    (folder / "genesis.txt").write_text("In the end.")
    assert names(sync("--dry-run")["changed"]) == names(sync()["changed"]) == ["genesis"]
    with memstore.open(tmp_path / "store") as store:
        dtypes = {spec.dtype for spec in store["genesis"].manifest.parts.values()}
        assert dtypes == {"float16"} and store["genesis"].text == "In the end."


@pytest.mark.parametrize("meanwhile", ["another text", "a note"])
def test_what_another_process_does_meanwhile_is_kept(
    sync: Any, run: Run, folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Between looking at all memories and taking one in."""
    store = tmp_path / "store"
    assert run("index", folder, "--model", model, "--store", store).exit_code == 0
    note = noting.note

    def late(opened: Any, name: str, change: Any) -> Any:
        monkeypatch.undo()
        if meanwhile == "a note":
            opened.set_metadata(name, opened[name].metadata | {"author": "Moses"})
        else:
            del opened[name]
            making.write(opened, name)
        return note(opened, name, change)

    monkeypatch.setattr(noting, "note", late)
    sync()
    with memstore.open(store) as opened:
        metadata = opened["genesis"].metadata
    if meanwhile == "a note":
        assert metadata["author"] == "Moses" and metadata["folder"] == str(folder)
    else:
        assert metadata == making.manifest().metadata


def test_one_memory_that_cannot_be_removed_does_not_keep_the_others(sync: Any, folder: Path, tmp_path: Path) -> None:
    sync()
    with memstore.open(tmp_path / "store") as store:
        fields = {**store["genesis"].manifest.fields(), "format_minor": FORMAT_MINOR + 1, "more": True}
        store.records.commit({key(SEALED, "genesis"): msgpack.packb(fields)})
    shutil.rmtree(folder / "letters")
    (folder / "genesis.txt").rename(folder / "exodus.txt")
    done = sync(expect=1)
    assert (names(done["added"]), done["removed"], names(done["failed"])) == (
        ["exodus"],
        ["letters/first"],
        ["genesis"],
    )
    assert "Install the version that wrote it" in done["failed"][0]["error"]


def test_an_unfinished_update_of_another_folder_is_left(
    run: Run, sync: Any, folder: Path, model: Path, tmp_path: Path
) -> None:
    sync()
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with memstore.open(tmp_path / "store") as store:
        draft = making.manifest("genesis", metadata=store["genesis"].metadata)
        store.create(draft, making.document(), store["genesis"].manifest).close()
        assert run("sync", other, "--model", model, "--store", tmp_path / "store").exit_code == 0
        assert store.unfinished() == [draft]


def test_people_are_told_what_was_done(run: Run, folder: Path, model: Path, tmp_path: Path) -> None:
    command = ("sync", folder, "--model", model, "--store", tmp_path / "store")
    lines = run(*command, "--dry-run").stdout.splitlines()
    assert lines == [
        "would be added: genesis",
        "would be added: letters/first",
        "2 added, 0 changed, 0 removed, 0 unchanged (dry run)",
    ]
    assert run(*command).stdout.splitlines()[0] == "added genesis"
    shutil.rmtree(folder / "letters")
    lines = run("sync", folder, "--model", "/no/model", "--store", tmp_path / "store").stdout.splitlines()
    assert lines == ["removed letters/first", "0 added, 0 changed, 1 removed, 1 unchanged"]
