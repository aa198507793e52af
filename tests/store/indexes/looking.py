"""Looking at the indexes of a memory."""

from __future__ import annotations

import pytest
import torch

from memstore.errors import (
    IndexNotice,
)
from memstore.indexes import open_index, remember
from memstore.slots import slots
from tests import kept

KINDS = {"bart": ["hidden"], "llama": [f"keys.{layer}.{head}" for layer in range(3) for head in range(2)]}


def names(memory):
    return [slot.name for slot in slots(memory.manifest)]


def folder(memory):
    return memory.store.records.folder(memory.manifest.id) / "indexes"


def files(memory):
    return sorted(path for path in folder(memory).rglob("*") if path.is_file())


def found(memory):
    """What every index of the memory finds: its scores and ids."""
    with memory.open() as opened:
        index = open_index(opened, "kept")
        return {name: each.search(torch.ones(2, each.width), 5) for name, each in index.indexes.items()}


def tune(memory, tuned, quality):
    with memory.open() as opened:
        remember(memory, open_index(opened, "kept"), tuned, quality)


def expect_built(memory, reason):
    """Opening it gives a notice with this reason, the right results, and an index that is found the next time."""
    kept.built.clear()
    with pytest.warns(IndexNotice, match=reason):
        first = found(memory)
    assert len(kept.built) == len(names(memory))
    kept.built.clear()
    again = found(memory)
    assert kept.built == []
    with memory.open() as opened:
        exact = open_index(opened, "exact").indexes
        scale = memory.store.indexes(memory.name)[0].options["scale"]
        for name, (scores, ids) in first.items():
            assert torch.equal(ids, again[name][1]) and torch.equal(scores, again[name][0])
            truth = exact[name].search(torch.ones(2, exact[name].width), 5)[0]  # tokens that repeat have equal keys
            torch.testing.assert_close(scores, truth * scale, rtol=1e-5, atol=1e-5)


def expect_nothing_left(library):
    assert library.records.items(b"i") == []
    assert library.records.memory_ids() == []
    assert list((library.path / "locks").iterdir()) == []
