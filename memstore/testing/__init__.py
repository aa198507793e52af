"""Contract kits: what an index, a record store or an adapter must keep, as pytest classes to inherit.

from memstore.testing import VectorIndexContract

class TestMyIndex(VectorIndexContract):
    index = MyIndex
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memstore.testing.adapters import ModelAdapterContract
    from memstore.testing.indexes import VectorIndexContract
    from memstore.testing.records import RecordStoreContract

__all__ = ["ModelAdapterContract", "RecordStoreContract", "VectorIndexContract"]

_KITS = {"ModelAdapterContract": "adapters", "RecordStoreContract": "records", "VectorIndexContract": "indexes"}

pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in (*_KITS.values(), "truth")))


def __getattr__(name: str) -> Any:
    """Each kit is imported when it is asked for: that of record stores needs no torch."""
    if name not in _KITS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_KITS[name]}"), name)
