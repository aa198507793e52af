"""``verify`` finds every damaged block, and a repair rebuilds what can be rebuilt and loses nothing that was whole."""

from __future__ import annotations

from typing import Any

import pytest

import memstore
from memstore import describe, encode
from memstore.errors import DamagedMemoryError
from memstore.indexes import reindex
from memstore.store import MemoryStore
from memstore.values import block_key
from tests import tiny
from tests.faults.harming import damage
from tests.models import build, tokens
from tests.store.making import contents

TEXT = "In the beginning was the Word, and the Word was with God.\n" * 12


@pytest.fixture
def encoded(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three memories in blocks of 256 tokens, of ids and of a text, with the models that wrote them."""
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)
    bart, llama = build("bart"), tiny.llama()
    library.encode(bart, input_ids=tokens(600), name="ids", metadata={"year": 1})
    library.encode(llama, tiny.tokenizer(), TEXT, name="text", window=64)
    library.encode(llama, tiny.tokenizer(), TEXT, name="anchored", window=64, anchors=True)
    return {"ids": (bart, None), "text": (llama, tiny.tokenizer()), "anchored": (llama, tiny.tokenizer())}


@pytest.mark.parametrize("name", ["ids", "text", "anchored"])
def test_vectors_are_read_anew_to_the_same_bytes(library: MemoryStore, encoded: dict[str, Any], name: str) -> None:
    memory, (model, tokenizer) = library[name], encoded[name]
    part = next(part for part, spec in memory.manifest.parts.items() if spec.every == 1)
    before, others = contents(memory), [other for other in library.names() if other != name]
    reindex(memory, "hnsw", {"m": 8, "ef_search": 64}) if name == "ids" else None
    damage(memory, block_key(part, 1))
    (result,) = library.verify(name, repair=True)
    assert (result.ok, len(result.problems)) == (False, 2)
    assert f"--repair --model MODEL` reads it anew with the {type(model).__name__}" in result.problems[1]
    (result,) = library.verify(name, repair=True, model=model, tokenizer=tokenizer)
    assert (result.ok, result.problems, result.repaired[0]) == (True, [], "It was read anew, to the bytes it had.")
    again = library[name]
    assert contents(again) == before
    assert (again.metadata, again.name) == (memory.metadata, name)
    assert library.names() == sorted([name, *others])
    assert (again.manifest.rule, again.manifest.anchors) == (memory.manifest.rule, memory.manifest.anchors)
    assert len(list(library.path.glob("memories/*"))) == 3
    if name == "ids":
        (record,) = library.indexes(name)
        assert (record.options["m"], record.tuned) == (8, {"ef_search": 64})
        with memstore.attach(model, again) as attached:
            assert attached.generate(max_new_tokens=2).shape[0] == 1


def test_another_model_repairs_nothing_and_costs_nothing(
    library: MemoryStore, encoded: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    memory = library["ids"]
    damage(memory, block_key("hidden", 1))
    (result,) = library.verify("ids", repair=True, model=build("bart", seed=1))
    assert not result.ok and "the model given is not the one that wrote it: weights" in result.problems[-1]
    assert caplog.messages[-1].startswith("memory 'ids' could not be read anew: the model given is not the one")
    assert library.names() == ["anchored", "ids", "text"]
    (result,) = library.verify("ids", repair=True, model="bart")
    assert "str is no transformers model" in result.problems[-1]
    assert library["ids"].manifest == memory.manifest
    with library["ids"].open() as opened:  # what was whole is as it was
        opened.block("hidden", 0)
        with pytest.raises(DamagedMemoryError):
            opened.block("hidden", 1)


@pytest.mark.parametrize("change", ["repaired", "removed", "interrupted"])
def test_other_processes_while_one_repairs(
    library: MemoryStore, encoded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    memory, (model, tokenizer) = library["text"], encoded["text"]
    before, names, write = contents(memory), library.names(), encode.write
    damage(memory, block_key("keys.0", 1))
    inner = []

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(encode, "write", write)
        assert library.names() == names  # nothing half-made is seen
        if change == "interrupted":
            raise KeyboardInterrupt
        if change == "removed":
            del library["text"]
        else:
            inner.extend(library.verify("text", repair=True, model=model, tokenizer=tokenizer))
        return write(*arguments)

    monkeypatch.setattr(encode, "write", late)
    try:
        (result,) = library.verify("text", repair=True, model=model, tokenizer=tokenizer)
    except KeyboardInterrupt:
        (result,) = library.verify("text", repair=True, model=model, tokenizer=tokenizer)
    if change == "removed":
        assert not result.ok and "was removed while it was being written" in result.problems[-1]
        assert library.names() == ["anchored", "ids"]
        return
    assert result.ok and contents(library["text"]) == before
    assert library.names() == names and len(library.records.memory_ids()) == 3
    assert library.records.lock_names() == []
    if change == "repaired":
        assert "Another process is encoding 'text'" in inner[0].problems[-1]


def test_a_damaged_index_is_noted_and_built_anew(library: MemoryStore, encoded: dict[str, Any]) -> None:
    reindex(library["ids"], "hnsw", {"m": 8})
    (file,) = library.path.glob("memories/*/indexes/*/*")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    (result,) = library.verify("ids")
    assert result.ok and list(result.indexes) == ["hnsw"] and "is damaged" in result.indexes["hnsw"]
    (result,) = library.verify("ids", repair=True)
    assert (result.ok, result.indexes, result.repaired) == (True, {}, ["The index 'hnsw' was built anew."])
    assert library.verify("ids")[0].indexes == {}
    assert library.indexes("ids")[0].options["m"] == 8
