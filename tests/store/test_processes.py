"""Workers of a data loader, forked or spawned, read a store as their parent does, or are told what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import memstore
from memstore.errors import StoreError
from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.store import MemoryStore
from tests.store import making


class Held(Dataset[Any]):
    """Rows of a memory that its maker has open."""

    def __init__(self, opened: OpenMemory) -> None:
        self.opened = opened

    def __len__(self) -> int:
        return making.TOKENS

    def __getitem__(self, i: int) -> Any:
        return self.opened.rows("large", i, i + 1).clone()


class Named(Dataset[Any]):
    """Rows of a memory that each worker opens for itself."""

    def __init__(self, store: Path, name: str) -> None:
        self.store, self.name = store, name
        self.opened: OpenMemory | None = None

    def __len__(self) -> int:
        return making.TOKENS

    def __getitem__(self, i: int) -> Any:
        if self.opened is None:
            self.opened = memstore.open(self.store, "r")[self.name].open()
        return self.opened.rows("large", i, i + 1).clone()


def loaded(dataset: Dataset[Any], context: str) -> Any:
    loader = DataLoader(dataset, batch_size=50, num_workers=2, multiprocessing_context=context)
    return torch.cat(list(loader)).reshape(-1, 40).numpy()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_open_a_store_by_its_path(library: MemoryStore, context: str) -> None:
    making.write(library)
    np.testing.assert_array_equal(
        loaded(Named(library.path, "esther"), context), making.rows("large", 0, making.TOKENS)
    )


def test_forked_workers_may_use_what_their_parent_has_open(library: MemoryStore) -> None:
    with making.write(library).open() as opened:
        np.testing.assert_array_equal(loaded(Held(opened), "fork"), making.rows("large", 0, making.TOKENS))
        assert library.names() == ["esther"]
        making.write(library, "ruth")


@pytest.mark.parametrize("what", ["store", "memory", "open memory"])
def test_what_cannot_be_sent_to_a_spawned_worker_says_what_to_do(library: MemoryStore, what: str) -> None:
    memory: Memory = making.write(library)
    with memory.open() as opened:
        dataset: Any = Held({"store": library, "memory": memory, "open memory": opened}[what])  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="cannot be copied or pickled. Another process opens"):
            loaded(dataset, "spawn")
