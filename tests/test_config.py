"""Layers of configuration and the errors they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore import config, registry
from memstore.config import Config
from memstore.errors import ConfigError, PluginError
from memstore.interfaces import Options, VectorIndex

DEFAULTS = ("defaults", {"store": {"path": "d", "records": "lmdb"}, "index": {"backend": "exact", "options": {}}})


class IvfOptions(Options):
    nlist: int = 64
    nprobe: int = 8


class Ivf(VectorIndex):
    Options = IvfOptions

    def build(self, blocks: Any) -> None: ...

    def search(self, queries: Any, k: int) -> Any: ...


@pytest.fixture(autouse=True)
def user_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user configuration directory, so that no test reads the developer's own."""
    directory = tmp_path_factory.mktemp("user")
    monkeypatch.setattr(config, "user_config_path", lambda _: directory)
    return directory


@pytest.fixture
def ivf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load", lambda group, name, base: Ivf)


def test_defaults_alone_are_complete(tmp_path: Path) -> None:
    settings = config.load(tmp_path, {}).settings
    assert settings.store.path == Path("library")
    assert (settings.store.records, settings.index.backend, settings.index.options) == ("lmdb", "exact", {})


def test_the_plugins_toml_of_this_repository_is_valid() -> None:
    config.load(Path(__file__).parents[1], {})


def test_each_layer_overrides_the_one_below(tmp_path: Path, user_directory: Path) -> None:
    (user_directory / "plugins.toml").write_text('[store]\npath = "user"\nrecords = "user"\n')
    (tmp_path / "plugins.toml").write_text('[store]\npath = "project"\n')
    assert config.load(tmp_path, {}).settings.store.model_dump() == {"path": Path("project"), "records": "user"}
    loaded = config.load(tmp_path, {"MEMSTORE__STORE__PATH": "~/env", "MEMSTORE_CACHE": "elsewhere"})
    assert loaded.settings.store.path == Path.home() / "env"
    assert loaded.origins["store.path"] == "MEMSTORE__STORE__PATH"
    assert loaded.origins["store.records"] == str(user_directory / "plugins.toml")


def test_options_of_one_backend_merge_over_layers(ivf: None) -> None:
    lower = ("low", {"index": {"backend": "ivf", "options": {"nlist": 16, "nprobe": 2}}})
    upper = ("up", {"index": {"backend": "ivf", "options": {"nprobe": "4"}}})
    assert Config([DEFAULTS, lower, upper]).index().options == IvfOptions(nlist=16, nprobe=4)


def test_a_change_of_backend_replaces_the_options(ivf: None) -> None:
    lower = ("low", {"index": {"backend": "hnsw", "options": {"m": 16}}})
    upper = ("up", {"index": {"backend": "ivf", "options": {"nprobe": 4}}})
    merged = Config([DEFAULTS, lower, upper])
    assert merged.settings.index.options == {"nprobe": 4}
    assert "index.options.m" not in merged.origins
    assert Config([DEFAULTS, lower, ("env", {"index": {"backend": "ivf"}})]).index().options == IvfOptions()


def test_another_backend_than_the_configured_one_gets_its_own_defaults(ivf: None) -> None:
    merged = Config([DEFAULTS, ("file", {"index": {"backend": "hnsw", "options": {"m": 16}}})])
    assert merged.index("ivf").options == IvfOptions()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"store": {"pth": "x"}}, "file: store.pth = 'x': there is no such key; did you mean 'path'?"),
        ({"stroe": {"path": "x"}}, "file: stroe = {'path': 'x'}: there is no such key; did you mean 'store'?"),
        ({"zzz": 1}, "file: zzz = 1: there is no such key; known here: store, index."),
        ({"store": {"records": 3}}, "file: store.records = 3: Input should be a valid string."),
        ({"store": "x"}, "file: store = 'x': must be a table."),
        ({"index": {"backend": {"name": "exact"}}}, "file: index.backend = {'name': 'exact'}: must be a single value."),
    ],
)
def test_an_error_names_the_origin_the_key_the_value_and_the_fix(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config([DEFAULTS, ("file", table)])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nprob": 4}, "file: index.options.nprob = 4: there is no such key; did you mean 'nprobe'?"),
        ({"nprobe": "many"}, "file: index.options.nprobe = 'many': Input should be a valid integer"),
    ],
)
def test_options_are_checked_by_the_backend(ivf: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config([DEFAULTS, ("file", {"index": {"backend": "ivf", "options": options}})]).index()
    assert str(caught.value).startswith(message)


def test_an_unknown_backend_is_blamed_on_the_setting_or_on_the_argument() -> None:
    wrong = Config([DEFAULTS, ("file", {"index": {"backend": "exakt"}, "store": {"records": "exact"}})])
    with pytest.raises(ConfigError, match=r"file: index.backend = 'exakt': .* Did you mean 'exact'\?"):
        wrong.index()
    with pytest.raises(PluginError, match=r"^No plugin of memstore.backends is named 'hnsv'"):
        wrong.index("hnsv")


def test_files_that_cannot_be_parsed_are_named(tmp_path: Path) -> None:
    file = tmp_path / "plugins.toml"
    file.write_text("[store\n")
    with pytest.raises(ConfigError, match="plugins.toml: is not valid TOML"):
        config.load(tmp_path, {})
    file.write_bytes(b'[store]\npath = "\xff"\n')
    with pytest.raises(ConfigError, match="plugins.toml: is not valid TOML"):
        config.load(tmp_path, {})


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^MEMSTORE__STORE__PAHT: store.paht = 'x': .* did you mean 'path'"):
        config.load(tmp_path, {"MEMSTORE__STORE__PAHT": "x"})
    with pytest.raises(ConfigError, match="^MEMSTORE__STORE: store = 'x': must be a table"):
        config.load(tmp_path, {"MEMSTORE__STORE": "x"})
    with pytest.raises(ConfigError, match="^MEMSTORE__STORE__PATH: store.path = '~nobody-here/x': .*home directory"):
        config.load(tmp_path, {"MEMSTORE__STORE__PATH": "~nobody-here/x"})


options = st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3)
index_tables = st.fixed_dictionaries(
    {}, optional={"backend": st.sampled_from(["exact", "ivf", "hnsw"]), "options": options}
)


@given(st.lists(index_tables, max_size=5))
def test_layering_equals_a_fold_over_the_layers(tables: list[dict[str, Any]]) -> None:
    backend = "exact"
    expected: dict[str, int] = {}
    origins: dict[str, str] = {}
    for number, table in enumerate(tables):
        if table.get("backend", backend) != backend:
            expected = {}
        backend = table.get("backend", backend)
        expected = {**expected, **table.get("options", {})}
        origins.update(dict.fromkeys(table.get("options", {}), str(number)))
    merged = Config([DEFAULTS, *((str(n), {"index": table}) for n, table in enumerate(tables))])
    assert (merged.settings.index.backend, merged.settings.index.options) == (backend, expected)
    assert {k: merged.origins[f"index.options.{k}"] for k in expected} == {k: origins[k] for k in expected}
