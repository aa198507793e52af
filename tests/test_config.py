"""Layers of configuration: which wins, where each value comes from, and the backends that are made by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore import config, registry
from memstore.config import Config
from memstore.config.layers import Layer, Origin
from memstore.config.sources import read
from memstore.errors import ConfigError, PluginError
from memstore.interfaces import Options, VectorIndex

pytestmark = pytest.mark.usefixtures("user_directory")
DEFAULTS = Layer(Origin("defaults"), read(config.DEFAULTS) or {})


def layer(place: str, **table: Any) -> Layer:
    return Layer(Origin(place), table)


class IvfOptions(Options):
    nlist: int = 64
    nprobe: int = 8


class Ivf(VectorIndex):
    Options = IvfOptions

    def build(self, blocks: Any) -> None: ...

    def search(self, queries: Any, k: int) -> Any: ...


@pytest.fixture
def ivf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend is this one."""
    monkeypatch.setattr(registry, "load", lambda group, name, base: Ivf)


def origins(loaded: Config) -> dict[str, str]:
    return {".".join(path): str(leaf.origin) for path, leaf in loaded.leaves.items()}


def test_defaults_alone_are_complete(tmp_path: Path) -> None:
    loaded = config.load(tmp_path, {})
    assert loaded.settings.model_dump() == {
        "store": {"path": Path("library"), "records": "lmdb"},
        "index": {
            "backend": "exact",
            "options": {},
            "auto": {"exact_tokens": 200_000, "target_mass": 0.99, "small": "exact"},
        },
    }
    assert set(origins(loaded).values()) == {"defaults"}
    assert loaded.profile is None


def test_the_plugins_toml_of_this_repository_is_valid() -> None:
    config.load(Path(__file__).parents[1], {})


def test_each_layer_overrides_the_one_below(tmp_path: Path, user_directory: Path) -> None:
    (user_directory / "plugins.toml").write_text('[store]\npath = "user"\nrecords = "user"\n')
    (tmp_path / "plugins.toml").write_text('[store]\npath = "project"\n')
    assert config.load(tmp_path, {}).settings.store.model_dump() == {"path": Path("project"), "records": "user"}
    environ = {"MEMSTORE__STORE__PATH": "~/env", "MEMSTORE_CACHE": "elsewhere"}
    loaded = config.load(tmp_path, environ)
    assert loaded.settings.store.path == Path.home() / "env"
    assert origins(loaded)["store.path"] == "MEMSTORE__STORE__PATH"
    assert origins(loaded)["store.records"] == str(user_directory / "plugins.toml")
    above = config.load(tmp_path, environ, given={"store": {"path": "given"}})
    assert above.settings.store.path == Path("given")
    assert origins(above)["store.path"] == "command line"


def test_the_file_of_the_current_directory_is_the_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins.toml").write_text('\ufeff[store]\r\npath = "here"\r\n', encoding="utf-8", newline="")
    monkeypatch.chdir(tmp_path)
    assert config.load(environ={}).settings.store.path == Path("here")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert config.load(environ={}).settings.store.path == Path("library")


def test_options_of_one_backend_merge_over_layers(ivf: None) -> None:
    lower = layer("low", index={"backend": "ivf", "options": {"nlist": 16, "nprobe": 2}})
    upper = layer("up", index={"backend": "ivf", "options": {"nprobe": "4"}})
    assert Config([DEFAULTS, lower, upper]).index_plugin()[2] == IvfOptions(nlist=16, nprobe=4)


def test_a_change_of_backend_replaces_the_options(ivf: None) -> None:
    lower = layer("low", index={"backend": "hnsw", "options": {"m": 16}})
    upper = layer("up", index={"backend": "ivf", "options": {"nprobe": 4}})
    merged = Config([DEFAULTS, lower, upper])
    assert merged.settings.index.options == {"nprobe": 4}
    assert "index.options.m" not in origins(merged)
    emptied = Config([DEFAULTS, lower, layer("env", index={"backend": "ivf"})])
    assert emptied.index_plugin()[2] == IvfOptions()
    assert origins(emptied)["index.options"] == "env"


def test_another_backend_than_the_configured_one_gets_its_own_defaults(ivf: None) -> None:
    merged = Config([DEFAULTS, layer("file", index={"backend": "hnsw", "options": {"m": 16}})])
    assert merged.index_plugin("ivf")[2] == IvfOptions()
    assert merged.index_plugin("ivf", {"nlist": 2})[2] == IvfOptions(nlist=2)


def test_given_options_override_the_configured_ones(ivf: None) -> None:
    merged = Config([DEFAULTS, layer("file", index={"backend": "ivf", "options": {"nlist": 16, "nprobe": 2}})])
    for backend in (None, "ivf"):
        assert merged.index_plugin(backend, {"nprobe": "3"})[2] == IvfOptions(nlist=16, nprobe=3)
        assert merged.index_plugin(backend) == ("ivf", Ivf, IvfOptions(nlist=16, nprobe=2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nprobe": "many"}, "option nprobe = 'many': Input should be a valid integer"),
        ({"nprob": 4}, "option nprob = 4: there is no such key; did you mean 'nprobe'?"),
        ({"nlist": {"a": 1}}, "option nlist = {'a': 1}: must be a single value."),
        ({}, "file: index.options.nlist = 'x': Input should be a valid integer"),
    ],
)
def test_an_error_in_a_given_option_blames_no_file(ivf: None, given: dict[str, Any], message: str) -> None:
    configured = {"nlist": 3} if given else {"nlist": "x"}
    merged = Config([DEFAULTS, layer("file", index={"backend": "ivf", "options": configured})])
    with pytest.raises(ConfigError) as caught:
        merged.index_plugin("ivf", given)
    assert str(caught.value).startswith(message)


def test_auto_is_a_name_that_a_configuration_may_give() -> None:
    merged = Config([DEFAULTS, layer("file", index={"backend": "auto", "auto": {"exact_tokens": "5"}})])
    assert merged.settings.index.backend == "auto"
    assert merged.settings.index.auto.exact_tokens == 5


def test_an_unknown_backend_is_blamed_on_the_setting_or_on_the_argument() -> None:
    wrong = Config([DEFAULTS, layer("file", index={"backend": "exakt"}, store={"records": "exact"})])
    with pytest.raises(ConfigError, match=r"^file: index.backend = 'exakt': .* Did you mean 'exact'\?"):
        wrong.index_plugin()
    with pytest.raises(ConfigError, match=r"^file: store.records = 'exact': .* is no RecordStore.*: in-memory, lmdb"):
        wrong.records()
    with pytest.raises(PluginError, match=r"^No plugin of memstore.backends is named 'hnsv'.* exact"):
        wrong.index_plugin("hnsv")
    with pytest.raises(PluginError, match=r"^Plugin 'lmdb' .* is no VectorIndex.*Index backends .*: exact"):
        wrong.index_plugin("lmdb")


backends = st.sampled_from(["exact", "ivf", "hnsw"])
options = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3)
index_tables = st.fixed_dictionaries({}, optional={"backend": backends, "options": options})


@settings(deadline=None)
@given(st.lists(index_tables, max_size=5))
def test_layering_equals_a_fold_over_the_layers(tables: list[dict[str, Any]]) -> None:
    backend = "exact"
    expected: dict[str, int] = {}
    where: dict[str, str] = {}
    for number, table in enumerate(tables):
        if table.get("backend", backend) != backend:
            expected = {}
        backend = table.get("backend", backend)
        expected = {**expected, **table.get("options", {})}
        where.update(dict.fromkeys(table.get("options", {}), str(number)))
    merged = Config([DEFAULTS, *(layer(str(n), index=table) for n, table in enumerate(tables))])
    assert (merged.settings.index.backend, merged.settings.index.options) == (backend, expected)
    assert {k: origins(merged)[f"index.options.{k}"] for k in expected} == {k: where[k] for k in expected}


@settings(deadline=None)
@given(st.lists(index_tables, max_size=3), index_tables, st.data())
def test_a_file_in_two_layers_says_the_same_as_in_one(
    below: list[dict[str, Any]], table: dict[str, Any], data: st.DataObject
) -> None:
    """Where ``backend`` stands in the first of the two, because it replaces the options below it."""
    first = data.draw(st.sets(st.sampled_from([*table.get("options", {}), "d"])))
    lower: dict[str, Any] = {key: value for key, value in table.items() if key != "options"}
    upper: dict[str, Any] = {}
    for key, value in table.get("options", {}).items():
        (lower if key in first else upper).setdefault("options", {})[key] = value
    base = [DEFAULTS, *(layer(str(n), index=each) for n, each in enumerate(below))]
    whole = Config([*base, layer("file", index=table)])
    parted = Config([*base, layer("file", index=lower), layer("file", index=upper)])
    assert (whole.settings, origins(whole)) == (parted.settings, origins(parted))
