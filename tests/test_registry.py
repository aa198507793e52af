"""Plugins found through entry points: the built-in ones and distributions that a test puts on the path."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from memstore import registry
from memstore.errors import PluginError, UnsupportedModelError
from memstore.interfaces import VectorIndex
from memstore_adapters.refused import REFUSED
from tests.conftest import Distribution


def model(model_type: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=model_type))


ADAPTERS = """
    bart bigbird_pegasus encoder-decoder gemma generic gpt2 gpt_neox led llama nllb-moe smollm3 speech_to_text
    switch_transformers t5 t5gemma whisper
""".split()


def test_the_built_in_plugins_are_listed() -> None:
    found = {(p.group, p.name) for p in registry.plugins() if p.distribution == "memstore-attention"}
    assert found == {
        *((registry.ADAPTERS, name) for name in ADAPTERS),
        *((registry.BACKENDS, name) for name in ("exact", "faiss-flat", "faiss-ivf", "faiss-pca", "faiss-pq", "hnsw")),
        *((registry.BACKENDS, name) for name in ("in-memory", "lmdb")),
    }
    assert all(p.group == registry.BACKENDS for p in registry.plugins(registry.BACKENDS))


def test_a_third_party_plugin_is_listed_without_being_imported(distribution: Distribution) -> None:
    distribution("third", registry.BACKENDS, {"boom": "third_boom:Boom"}, {"third_boom": "raise SystemExit"})
    info = next(p for p in registry.plugins() if p.name == "boom")
    assert info == registry.PluginInfo("boom", registry.BACKENDS, "third", "2.5", "third_boom:Boom")


def test_listing_imports_no_plugin_and_no_torch() -> None:
    code = (
        "import sys; from memstore import registry; registry.plugins();"
        "print(*{'torch', 'transformers', 'memstore_backends', 'memstore_adapters'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_loading_returns_the_class(distribution: Distribution) -> None:
    distribution("third", registry.BACKENDS, {"plain": "third_plain:Plain"}, {"third_plain": "class Plain: ..."})
    assert registry.load(registry.BACKENDS, "plain").__name__ == "Plain"
    with pytest.raises(PluginError, match="'plain' of memstore.backends is no VectorIndex"):
        registry.load(registry.BACKENDS, "plain", VectorIndex)


def test_two_distributions_with_one_name_are_both_named(distribution: Distribution) -> None:
    distribution("third", registry.BACKENDS, {"exact": "third:Exact"})
    with pytest.raises(PluginError, match="both define the plugin 'exact'") as caught:
        registry.load(registry.BACKENDS, "exact")
    assert "third" in str(caught.value)
    assert "memstore-attention" in str(caught.value)


def test_an_unknown_name_gets_a_close_match_and_the_list() -> None:
    installed = ", ".join(plugin.name for plugin in registry.plugins(registry.BACKENDS))
    with pytest.raises(PluginError, match=rf"named 'exakt'. Did you mean 'exact'\? Installed: {installed}\."):
        registry.load(registry.BACKENDS, "exakt")
    with pytest.raises(PluginError, match="Installed: none"):
        registry.load("memstore.nothing", "x")


@pytest.mark.parametrize("name", [None, 5, ["exact"], object], ids=str)
def test_what_is_no_name_is_unknown(name: Any) -> None:
    with pytest.raises(PluginError, match="Installed: exact"):
        registry.load(registry.BACKENDS, name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import faiss_of_nowhere.sub",
            "needs the module 'faiss_of_nowhere'. To use it: install the package that provides the module 'f",
        ),
        ("from json import nothing", "cannot be imported: cannot import name 'nothing' from 'json'"),
        ("", "cannot be imported: module 'third_bad' has no attribute 'Bad'"),
        (None, "does not exist there. Reinstall third"),
    ],
)
def test_what_cannot_be_imported_says_why(distribution: Distribution, source: str | None, message: str) -> None:
    modules = {} if source is None else {"third_bad": source}
    distribution("third", registry.BACKENDS, {"bad": "third_bad:Bad"}, modules)
    with pytest.raises(PluginError) as caught:
        registry.load(registry.BACKENDS, "bad")
    assert str(caught.value).startswith("Plugin 'bad' (third_bad:Bad) of third ")
    assert message in str(caught.value)


ADAPTER = """
class A:
    model_types = ('mymodel', 'other')
    refused = {'odd': 'it sees double', 'mymodel': 'nobody reads it'}
class B:
    model_types = ('other',)
"""
WILLING = """
class Willing:
    model_types = ()
    @classmethod
    def serves_unknown(cls, model):
        return model.config.model_type != "rwkv"
"""


@pytest.fixture
def adapters(distribution: Distribution, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", "memstore.test_adapters")
    distribution(
        "third",
        registry.ADAPTERS,
        {"a": "third_adapters:A", "b": "third_adapters:B", "broken": "third_broken:C", "w": "third_willing:Willing"},
        {"third_adapters": ADAPTER, "third_broken": "import nowhere_at_all", "third_willing": WILLING},
    )


def test_the_adapter_is_chosen_by_model_type(adapters: None) -> None:
    assert registry.adapter_for(model("mymodel")).__name__ == "A"


def test_an_adapter_that_serves_unknown_models_is_tried_where_no_other_claims_one(adapters: None) -> None:
    assert registry.adapter_for(model("unheard-of")).__name__ == "Willing"


def test_two_adapters_for_one_model_type_are_both_named(adapters: None) -> None:
    with pytest.raises(PluginError, match="adapters a and b both claim model_type 'other'"):
        registry.adapter_for(model("other"))


def test_a_model_that_cannot_be_served_is_refused_with_the_reason(adapters: None) -> None:
    odd = r"SimpleNamespace \(model_type 'odd'\) cannot read a memory: it sees double\.$"
    with pytest.raises(UnsupportedModelError, match=odd):
        registry.adapter_for(model("odd"))


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_a_family_that_no_adapter_serves_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[model_type])):
        registry.adapter_for(model(model_type))


def test_an_unsupported_model_names_the_supported_ones_and_what_is_broken(adapters: None) -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'rwkv'. Supported: mymodel, other. .*nowhere_at_all"):
        registry.adapter_for(model("rwkv"))
