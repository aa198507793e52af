"""Many processes read while others write: each finds one state or the other, and what it holds stays."""

from __future__ import annotations

from pathlib import Path

from tests.faults.operations import LINE
from tests.faults.server import Server

VERSIONS = (
    {"jonah": LINE * 6, "joel": "The word of the Lord."},
    {"jonah": "The word of the Lord.\n" + LINE * 5, "joel": LINE * 2},
)
# What a writer may be told of another one that is at work on the same names.
TOLD = (
    "already holds a memory named",
    "holds another memory named",
    "is being written",
    "holds no memory named",
    "holds no complete memory named",
    "was removed while",
    "has been removed",
    "another version has taken its place",
    "nother process",
    "documents could not be indexed",
)


def test_readers_see_one_state_or_the_other_while_two_processes_write(
    server: Server, tmp_path: Path, times: int
) -> None:
    """Ten readers attach, ask and verify while two writers add, index and remove the same names: for minutes with
    ``--full``."""
    folders, texts = [], {name: [version[name] for version in VERSIONS] for name in VERSIONS[0]}
    for number, version in enumerate(VERSIONS):
        folder = tmp_path / f"version-{number}"
        folder.mkdir()
        folders.append(str(folder))
        for name, text in version.items():
            (folder / f"{name}.txt").write_text(text)
    store, stop = tmp_path / "store", tmp_path / "stop"
    index = f"index {folders[0]} --model stub --store {store}"
    assert server.call("attempt", command=index, store=str(store))["code"] == 0
    writers = [
        server.start("write_for_ever", store=str(store), folders=each, stop=str(stop))
        for each in (folders, folders[::-1])
    ]
    rounds = 2 * times**2
    try:
        readers = [server.start("read_again_and_again", store=str(store), texts=texts, times=rounds) for _ in range(10)]
        for reader in readers:
            assert reader.result() >= rounds
    finally:
        stop.touch()
    for writer in writers:
        assert writer.result() >= 1
        assert "Traceback" not in writer.errors
        for line in writer.errors.splitlines():
            assert not line.startswith("Error") or any(words in line for words in TOLD), line
    found = server.call("attempt", command=index, store=str(store))["state"]
    assert (found["left"], found["pending"]) == ([], [])
    assert (store / "catalog" / "data.mdb").stat().st_size < 1 << 18
