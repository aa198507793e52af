"""``verify`` finds every damaged block, and what no record names. Nothing here loads torch."""

from __future__ import annotations

import os
from typing import Any

import msgpack
import pytest

from memstore import verify
from memstore.catalog import PENDING, SEALED, key, strays
from memstore.manifest import FORMAT_MINOR
from memstore.memory import Document
from memstore.store import MemoryStore
from memstore.values import block_key
from tests.faults.harming import (
    KilledError,
    damage,
    data_of,
    kill,
)
from tests.store import making


def test_verify_finds_every_damaged_block(library: MemoryStore) -> None:
    memory = making.write(library)
    making.write(library, "ruth")
    damage(memory, *(block_key("large", i) for i in (1, 3, 4)))  # smaller values lie in the structure
    esther, ruth = library.verify()
    assert (esther.ok, ruth.ok, ruth.problems) == (False, True, [])
    found = [f"block {i} of 'large'" for i in (1, 3, 4)]
    assert esther.problems == [f"The bytes of {what} differ from those written." for what in found]


def test_what_is_removed_or_replaced_while_it_is_verified_is_not_damaged(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("esther", "gone", "ruth"):
        making.write(library, name)

    def late(store: MemoryStore, ids: list[str]) -> Any:
        if "gone" in library:
            del library["gone"]
            old = library["esther"].manifest
            with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
                making.fill(writer)
        return run(store, ids)

    run = verify._run
    monkeypatch.setattr(verify, "_run", late)
    assert [(result.name, result.ok) for result in library.verify()] == [("esther", True), ("ruth", True)]


def test_a_memory_of_a_newer_version_is_told_and_the_others_are_verified_and_mended(library: MemoryStore) -> None:
    making.write(library)
    manifest = making.write(library, "newer").manifest
    fields = {**manifest.fields(), "format_minor": FORMAT_MINOR + 1, "more": True}
    library.records.commit({key(SEALED, "newer"): msgpack.packb(fields)})
    for repair in (False, True):
        esther, newer = library.verify(repair=repair)
        assert (esther.ok, newer.ok) == (True, False)
        assert "Install the version that wrote it" in newer.problems[0]
    del library["newer"]
    assert len(list(library.path.glob("memories/*"))) == 1


@pytest.mark.parametrize(
    ("metadata", "way_out"),
    [
        ({}, "remove the memory and encode its document again."),
        ({"source": 3}, "remove the memory and encode its document again."),
        (
            {"source": "/a b/esther.txt"},
            "remove the memory, and `memstore index '/a b/esther.txt'` reads /a b/esther.txt again.",
        ),
        (
            {"source": "/b/x.txt"},
            "remove the memory, and `memstore index /b/x.txt --name esther` reads /b/x.txt again.",
        ),
        (
            {"source": "/b/esther.txt", "folder": "/b"},
            "remove the memory, and `memstore sync /b` reads /b/esther.txt again.",
        ),
    ],
    ids=str,
)
def test_a_memory_whose_text_is_damaged_too_is_left_and_says_so(
    library: MemoryStore, metadata: dict[str, Any], way_out: str
) -> None:
    memory = making.write(library, metadata=metadata)
    damage(memory, block_key("large", 0), b"dtext")
    harms = [
        ("its structure has changed", lambda: None),
        ("it has 100 bytes", lambda: os.truncate(data_of(memory), 100)),
    ]
    for what, harm in (*harms, ("it is missing", data_of(memory).unlink)):
        harm()
        (result,) = library.verify(repair=True)
        damaged, last = result.problems
        assert damaged.startswith(f"{data_of(memory)} is damaged: {what}") and damaged.endswith(".")
        assert "`" not in damaged and "emove" not in damaged  # no other advice than what can be done
        assert last == f"It cannot be rebuilt, because the text cannot be read either: {way_out}"
    assert library.names() == ["esther"]


def test_what_is_damaged_beyond_rebuilding_is_told_by_name_where_it_was_no_text(library: MemoryStore) -> None:
    ids = making.manifest("ids", has_text=False)
    with library.create(ids, Document(None, making.document().token_ids)) as writer:
        damage(making.fill(writer), block_key("large", 0), b"dids")
    features = making.manifest("features", has_text=False, has_ids=False)
    with library.create(features, Document()) as writer:
        damage(making.fill(writer), block_key("large", 0))
    why = ("its document, which was no text, is not kept", "the token ids cannot be read either")
    for result, reason in zip(library.verify(repair=True), why, strict=True):
        way_out = "remove the memory and encode its document again."
        assert result.problems[-1] == f"It cannot be rebuilt, because {reason}: {way_out}"


def test_what_the_catalog_says_nothing_of_is_a_stray(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("esther", "gone", "lost"):
        making.write(library, name)
    library.create(making.manifest("begun"), making.document()).close()
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(library.records, "delete", kill)
        del library["gone"]
    assert len(library.records.memory_ids()) == 4 and strays(library.records) == []
    lost = library["lost"].manifest
    library.records.commit({}, [key(SEALED, "lost")])
    assert strays(library.records) == [lost.id]
    library.records.commit({key(PENDING, "begun"): b"no manifest"})
    assert strays(library.records) == []  # it might be the one


@pytest.mark.parametrize("change", ["begun", "removed"])
def test_what_is_begun_or_removed_meanwhile_is_no_stray(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    making.write(library)
    items = library.records.items

    def late(prefix: bytes) -> list[tuple[bytes, bytes]]:
        before = items(prefix)
        monkeypatch.setattr(library.records, "items", items)
        if change == "begun":
            making.write(library, "ruth")
            return before
        del library["esther"]
        return items(prefix)

    monkeypatch.setattr(library.records, "items", late)
    assert strays(library.records) == []
    assert library.names() == (["esther", "ruth"] if change == "begun" else [])
