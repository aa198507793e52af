"""No plugin that comes with memstore goes without its contract."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from memstore import registry
from memstore.interfaces import ModelAdapter, RecordStore, VectorIndex
from memstore.testing import ModelAdapterContract, RecordStoreContract, VectorIndexContract
from tests.decoders import DECODERS

TESTED = {
    VectorIndex: ("index", VectorIndexContract, "tests.contracts.test_indexes"),
    RecordStore: ("records", RecordStoreContract, "tests.contracts.test_records"),
    ModelAdapter: ("adapter", ModelAdapterContract, "tests.contracts.test_adapters"),
}
PLUGINS = [plugin for plugin in registry.plugins() if plugin.distribution == "memstore-attention"]


def classes_for(plugin: type) -> list[type[Any]]:
    """The contract classes that pytest runs for a plugin."""
    attribute, contract, module = next(known for base, known in TESTED.items() if issubclass(plugin, base))
    classes = [value for name, value in vars(import_module(module)).items() if name.startswith("Test")]
    return [each for each in classes if issubclass(each, contract) and getattr(each, attribute) is plugin]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_every_plugin_has_its_contract_test(plugin: registry.PluginInfo) -> None:
    assert classes_for(registry.load(plugin.group, plugin.name)), f"Nothing in tests/contracts tests {plugin.value}."


@pytest.mark.parametrize(
    "adapter", [p for p in PLUGINS if p.group == registry.ADAPTERS], ids=lambda plugin: plugin.name
)
def test_every_model_type_has_one(adapter: registry.PluginInfo) -> None:
    loaded = registry.load(adapter.group, adapter.name)
    if loaded.model_types:  # an adapter without any serves models that nobody knows
        by_contract = {each().make_model().config.model_type for each in classes_for(loaded)}
        by_matrix = {name for name in DECODERS if name in loaded.model_types}  # of families that share an adapter
        assert by_contract and by_contract | by_matrix == set(loaded.model_types)
