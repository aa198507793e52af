"""What a wrong configuration is answered: the place, the key, the value, what is wrong, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore import config, registry
from memstore.config import Config
from memstore.errors import ConfigError
from tests.conftest import Distribution
from tests.tables import keys, tables, words

pytestmark = pytest.mark.usefixtures("user_directory")
Project = Callable[..., Config]

INDEX = """
from pydantic import model_validator
from memstore.interfaces import Options, VectorIndex

class Plain(VectorIndex):
    class Options(Options):
        {option}: int = 1
        pairs: list[tuple[str, int]] = []

        @model_validator(mode="after")
        def check(self):
            if self.{option} == 77:
                raise ValueError("77 is too much")
            return self

    def build(self, blocks): ...
    def search(self, queries, k): ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Load the configuration of a project whose plugins.toml holds this text, with these variables."""

    def load(text: str | bytes = b"", **variables: str) -> Config:
        (tmp_path / "plugins.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return config.load(tmp_path, variables)

    return load


def message(tmp_path: Path, call: Callable[[], Any]) -> str:
    """The message of the ConfigError that ``call`` must raise, without the folder."""
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value).replace(f"{tmp_path}{os.sep}", "")


WRONG = pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('store.pth = "x"', "store.pth = 'x': there is no such key; did you mean 'path'?"),
        ('store.PATH = "x"', "store.PATH = 'x': there is no such key; did you mean 'path'?"),
        ("stroe = {path = 1}", "stroe = {'path': 1}: there is no such key; did you mean 'store'?"),
        ("zzz = 1", "zzz = 1: there is no such key; known here: store, index"),
        ("index.auto.mass = 1", "index.auto.mass = 1: there is no such key; did you mean 'target_mass'?"),
        ("store.records = 3", "store.records = 3: Input should be a valid string."),
        ("store.records = ''", "store.records = '': must not be empty."),
        ("store.path = ''", "store.path = '': must not be empty."),
        ("store.path = 3", "store.path = 3: Input is not a valid path."),
        ("store.path = '~nobody-here/x'", "store.path = '~nobody-here/x': ~nobody-here is nobody's home"),
        ("index.auto.target_mass = 1.5", "index.auto.target_mass = 1.5: Input should be less than or equal to 1."),
        ("index.auto.target_mass = 0", "index.auto.target_mass = 0: Input should be greater than 0."),
        ("index.auto.target_mass = nan", "index.auto.target_mass = nan: Input should be "),
        ("index.auto.target_mass = true", "index.auto.target_mass = True: must be a number."),
        ("index.auto.exact_tokens = -1", "index.auto.exact_tokens = -1: Input should be greater than or equal to 0."),
        ("index.auto.exact_tokens = 0.5", "index.auto.exact_tokens = 0.5: Input should be a valid integer, got a numb"),
        ("index.auto.small = 'auto'", "index.auto.small = 'auto': must name a backend, which \"auto\" is not."),
        ("index.auto = 1", "index.auto = 1: must be a table with exact_tokens, target_mass, small."),
        ("index.options = 1", "index.options = 1: must be a table."),
        ("store = 'x'", "store = 'x': must be a table with path, records."),
        ("index = []", "index = []: must be a table with backend, options, auto."),
        ("index.backend.name = 1", "index.backend = {'name': 1}: must be a single value."),
        ("store.path.a = 1", "store.path = {'a': 1}: must be a single value."),
        ('"a b"."" = 1', "\"a b\" = {'': 1}: there is no such key; known here: store,"),
        (f"store.records = [{'1,' * 100}]", f"store.records = [{'1, ' * 32}1,…: Input should be a valid string."),
    ],
)


@WRONG
def test_a_file(project: Project, tmp_path: Path, text: str, expected: str) -> None:
    assert message(tmp_path, lambda: project(text)).startswith(f"plugins.toml: {expected}")


@WRONG
def test_a_profile_that_is_not_chosen(project: Project, tmp_path: Path, text: str, expected: str) -> None:
    found = message(tmp_path, lambda: project(f"profiles.gpu.{text}"))
    assert found.startswith(f"plugins.toml: profiles.gpu.{expected}")


def test_the_top_of_a_file_may_hold_profiles(project: Project, tmp_path: Path) -> None:
    assert message(tmp_path, lambda: project("profil = 1")).endswith("there is no such key; did you mean 'profile'?")
    assert message(tmp_path, lambda: project("z = 1")).endswith("known here: store, index, profile, profiles.")
    assert message(tmp_path, lambda: project("profiles.gpu.z = 1")).endswith("known here: store, index.")


def test_what_another_layer_overrides_is_wrong_all_the_same(project: Project, tmp_path: Path) -> None:
    found = message(tmp_path, lambda: project("store.records = 3", MEMSTORE__STORE__RECORDS="lmdb"))
    assert found == "plugins.toml: store.records = 3: Input should be a valid string."


def test_every_wrong_key_is_told_at_once(project: Project, tmp_path: Path) -> None:
    assert message(tmp_path, lambda: project("a = 1\nstore.b = 2")).count("\n") == 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[store\n", "is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 7)."),
        (b"[store]\npath = 1\npath = 2\n", "is not valid TOML: Cannot overwrite a value (at line 3, column 9)."),
        (b"[store]\npath = '\xff'\n", "is not UTF-8: byte 0xff in line 2. Save it as UTF-8."),
        (b"x = [" + b"9" * 5000 + b"]", "is not valid TOML: "),
        (b"x = " + b"[" * 10**5, "is not valid TOML: "),
    ],
    ids=range(5),
)
def test_a_file_that_does_not_parse(project: Project, tmp_path: Path, data: bytes, expected: str) -> None:
    assert message(tmp_path, lambda: project(data)).startswith(f"plugins.toml: {expected}")


def test_a_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder" / "plugins.toml").mkdir(parents=True)
    assert message(tmp_path, lambda: config.load(tmp_path / "folder", {})).startswith(
        f"folder{os.sep}plugins.toml: is a folder, where a file is read."
    )
    (tmp_path / "plugins.toml").symlink_to(tmp_path / "nowhere")
    assert message(tmp_path, lambda: config.load(tmp_path, {})).startswith("plugins.toml: is a link that leads nowhere")

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"defaults.toml: cannot be read: Permission denied\."):
        config.load(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MEMSTORE__STORE__PAHT", "store.paht = 'x': there is no such key; did you mean 'path'?"),
        ("MEMSTORE__INDEX__AUTO__TARGET_MASS", "index.auto.target_mass = 'x': Input should be a valid number, unable"),
        ("MEMSTORE__STORE", "store = 'x': must be a table: set MEMSTORE__STORE__PATH or MEMSTORE__STORE__RECORDS."),
        ("MEMSTORE__INDEX__OPTIONS", "index.options = 'x': must be a table: set MEMSTORE__INDEX__OPTIONS__NAME."),
        ("MEMSTORE__STORE__PATH__X", "store.path = {'x': 'x'}: must be a single value."),
        ("MEMSTORE__", "is not the name of a setting. They are named as MEMSTORE__STORE__PATH is."),
        ("MEMSTORE____X", "is not the name of a setting."),
        ("MEMSTORE__INDEX__", "is not the name of a setting."),
        ("MEMSTORE__INDEX___X", "index._x = 'x': there is no such key; known here: backend, options, auto."),
        (
            "MEMSTORE__PROFILES__GPU__STORE__PATH",
            "profiles are defined in plugins.toml alone, as [profiles.gpu.index].",
        ),
    ],
)
def test_a_variable(tmp_path: Path, name: str, expected: str) -> None:
    assert message(tmp_path, lambda: config.load(tmp_path, {name: "x"})).startswith(f"{name}: {expected}")


def test_two_variables_for_one_setting(tmp_path: Path) -> None:
    environ = {"MEMSTORE__STORE__PATH": "x", "MEMSTORE__store__path": "y"}
    found = message(tmp_path, lambda: config.load(tmp_path, environ))
    assert found == "MEMSTORE__store__path: sets the same as MEMSTORE__STORE__PATH. Unset one of them."


@pytest.fixture
def backends(distribution: Distribution) -> None:
    """The backends ``graph`` (option ``links``) and ``lists`` (option ``probes``), and one that cannot be imported."""
    distribution(
        "third",
        registry.BACKENDS,
        {"graph": "third_graph:Plain", "lists": "third_lists:Plain", "broken": "third_broken:Plain"},
        {
            "third_graph": INDEX.format(option="links"),
            "third_lists": INDEX.format(option="probes"),
            "third_broken": "raise OSError('no such device')",
        },
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("probs = 1", "probs = 1: there is no such key; did you mean 'probes'?"),
        ("zzz = 1", "zzz = 1: there is no such key; known here: probes, pairs."),
        ("links = 1", "links = 1: there is no such key; it is an option of 'graph', and the backend is 'lists'."),
        ("probes = '1.5'", "probes = '1.5': Input should be a valid integer, unable to parse string as an integer."),
        ("probes.a = 1", "probes = {'a': 1}: must be a single value."),
        ("pairs = [['a', 'b']]", "pairs = 'b': Input should be a valid integer, unable to parse string as an integer."),
    ],
)
def test_options_are_checked_by_the_backend(
    backends: None, project: Project, tmp_path: Path, options: str, expected: str
) -> None:
    loaded = project(f"index.backend = 'lists'\nindex.options.{options}")
    assert message(tmp_path, loaded.index_plugin) == f"plugins.toml: index.options.{expected}"
    chosen = project(f"profile = 'p'\n[profiles.p]\nindex.backend = 'lists'\nindex.options.{options}")
    assert message(tmp_path, chosen.index_plugin) == f"plugins.toml: profiles.p.index.options.{expected}"


def test_options_from_variables(backends: None, project: Project, tmp_path: Path) -> None:
    text = "index.backend = 'lists'"
    _, _, options = project(text, MEMSTORE__INDEX__OPTIONS__PROBES="8").index_plugin()
    assert options.model_dump()["probes"] == 8
    loaded = project(text, MEMSTORE__INDEX__OPTIONS__PROBES="many")
    found = message(tmp_path, loaded.index_plugin)
    assert found.startswith("MEMSTORE__INDEX__OPTIONS__PROBES: index.options.probes = 'many': Input should be a valid")


def test_options_that_do_not_go_together(backends: None, project: Project, tmp_path: Path) -> None:
    loaded = project("index.backend = 'lists'\nindex.options.probes = 77")
    assert message(tmp_path, loaded.index_plugin) == "plugins.toml: index.options = {'probes': 77}: 77 is too much."
    found = message(tmp_path, lambda: loaded.index_plugin(options={"probes": 77}))
    assert found == "options = {'probes': 77}: 77 is too much."


def test_a_backend_that_lacks_its_library(distribution: Distribution, project: Project, tmp_path: Path) -> None:
    distribution("third", registry.BACKENDS, {"needy": "third_needy:N [odd]"}, {"third_needy": "import nowhere_odd"})
    found = message(tmp_path, project("", MEMSTORE__INDEX__BACKEND="needy").index_plugin)
    assert found.startswith(
        "MEMSTORE__INDEX__BACKEND: index.backend = 'needy': Plugin 'needy' (third_needy:N [odd]) of "
    )
    assert "needs the module 'nowhere_odd'. To use it: pip install \"third[odd]\". Index backends that can b" in found
    assert "needy" not in found.partition("Index backends")[2]


def test_a_backend_that_cannot_be_imported(backends: None, project: Project, tmp_path: Path) -> None:
    found = message(tmp_path, project("index.backend = 'broken'").index_plugin)
    assert found.startswith("plugins.toml: index.backend = 'broken': Plugin 'broken' (third_broken:Plain) of third")
    assert "cannot be imported: no such device. Index backends that can be used here: exact, " in found


right = st.fixed_dictionaries(
    {},
    optional={
        "store": st.fixed_dictionaries({}, optional={"path": st.just("x"), "records": st.just("lmdb")}),
        "index": st.fixed_dictionaries(
            {},
            optional={
                "backend": st.sampled_from(["exact", "auto"]),
                "options": tables,
                "auto": st.fixed_dictionaries({}, optional={"target_mass": st.floats(0.1, 1)}),
            },
        ),
    },
)
configured = st.one_of(
    tables,
    right,
    st.builds(lambda table, profiles: {**table, "profiles": profiles}, right, st.dictionaries(keys, right, max_size=2)),
)
names = st.one_of(
    st.sampled_from(["STORE__PATH", "INDEX__OPTIONS__A", "INDEX__BACKEND", "INDEX__AUTO__SMALL"]),
    st.lists(words.map(str.upper) | st.text("AB_", max_size=3), max_size=4).map("__".join),
)


def leaves(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not isinstance(value, dict) or not value:
        return {path}
    return set().union(*(leaves(each, (*path, key)) for key, each in value.items()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(configured, st.dictionaries(names.map("MEMSTORE__{}".format), st.text(max_size=3), max_size=2))
def test_whatever_is_configured_is_right_or_a_config_error(
    tmp_path: Path, table: dict[str, Any], environ: dict[str, str]
) -> None:
    file = tmp_path / "plugins.toml"
    file.write_bytes(tomlkit.dumps(table).encode())
    try:
        loaded = config.load(tmp_path, environ)
    except ConfigError:
        return
    assert set(loaded.leaves) == leaves(loaded.settings.model_dump())
    assert {leaf.origin.place for leaf in loaded.leaves.values()} <= {"defaults", str(file), *environ}
