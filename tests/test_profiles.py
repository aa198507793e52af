"""Profiles: how one is chosen, what it overlays, and what overlays it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memstore import config
from memstore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("user_directory")

PROJECT = """
profile = "small"

[store]
path = "project"

[index]
backend = "first"
options = {a = 1, b = 2}

[profiles.small.store]
path = "small"

[profiles.gpu.index]
backend = "second"
options = {c = 3}

[profiles.same.index]
backend = "first"
options = {b = 3}

[profiles.nothing]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "plugins.toml").write_text(PROJECT)
    return tmp_path


def test_a_file_chooses_a_profile(project: Path) -> None:
    loaded = config.load(project, {})
    assert loaded.settings.store.path == Path("small")
    assert str(loaded.leaves["store", "path"].origin) == f"{project / 'plugins.toml'} [profiles.small]"
    assert loaded.profile is not None
    assert (loaded.profile.value, str(loaded.profile.origin)) == ("small", str(project / "plugins.toml"))


@pytest.mark.parametrize(
    ("name", "backend", "options"),
    [
        ("gpu", "second", {"c": 3}),
        ("same", "first", {"a": 1, "b": 3}),
        ("nothing", "first", {"a": 1, "b": 2}),
    ],
)
def test_a_variable_chooses_another_one(project: Path, name: str, backend: str, options: dict[str, int]) -> None:
    loaded = config.load(project, {"MEMSTORE__PROFILE": name})
    assert (loaded.settings.index.backend, loaded.settings.index.options) == (backend, options)
    assert loaded.settings.store.path == Path("project")


def test_the_command_line_chooses_above_all_and_for_its_child_processes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSTORE__PROFILE", "nothing")
    with config.command_line("gpu"):
        loaded = config.load(project)
        assert os.environ["MEMSTORE__PROFILE"] == "gpu"
    assert loaded.settings.index.backend == "second"
    assert loaded.profile is not None and str(loaded.profile.origin) == "command line"
    assert os.environ["MEMSTORE__PROFILE"] == "nothing"
    assert config.load(project).settings.index.backend == "first"


def test_variables_and_arguments_lie_above_the_profile(project: Path) -> None:
    environ = {"MEMSTORE__STORE__PATH": "env", "MEMSTORE__INDEX__OPTIONS__C": "4", "MEMSTORE__PROFILE": "gpu"}
    loaded = config.load(project, environ)
    assert loaded.settings.store.path == Path("env")
    assert loaded.settings.index.options == {"c": "4"}
    assert config.load(project, environ, {"store": {"path": "given"}}).settings.store.path == Path("given")


def test_one_profile_may_stand_in_several_files_and_lies_above_all_of_them(project: Path, user_directory: Path) -> None:
    (user_directory / "plugins.toml").write_text(
        '[profiles.gpu.store]\npath = "user"\n[profiles.gpu.index]\nbackend = "second"\noptions = {c = 1, d = 2}\n'
    )
    loaded = config.load(project, {"MEMSTORE__PROFILE": "gpu"})
    assert loaded.settings.store.path == Path("user")
    assert loaded.settings.index.options == {"c": 3, "d": 2}
    assert loaded.leaves["index", "options", "d"].origin.place == str(user_directory / "plugins.toml")


def test_a_profile_of_the_users_file_can_be_chosen_by_the_projects(tmp_path: Path, user_directory: Path) -> None:
    (user_directory / "plugins.toml").write_text('[profiles."on a gpu".store]\npath = "user"\n')
    (tmp_path / "plugins.toml").write_text('profile = "on a gpu"\n')
    loaded = config.load(tmp_path, {})
    assert loaded.settings.store.path == Path("user")
    assert str(loaded.leaves["store", "path"].origin).endswith('plugins.toml [profiles."on a gpu"]')


@pytest.mark.parametrize(
    ("name", "close"), [("gup", "; did you mean 'gpu'?"), ("GPU", "; did you mean 'gpu'?"), ("", "."), ("zzz", ".")]
)
def test_a_profile_that_does_not_exist(project: Path, user_directory: Path, name: str, close: str) -> None:
    (user_directory / "plugins.toml").write_text("[profiles.gpu]\n")
    with pytest.raises(ConfigError) as caught:
        config.load(project, {"MEMSTORE__PROFILE": name})
    user, own = user_directory / "plugins.toml", project / "plugins.toml"
    assert str(caught.value) == (
        f"MEMSTORE__PROFILE: profile = {name!r}: there is no such profile{close} Defined: 'gpu' (in {user} and {own}), "
        f"'small' (in {own}), 'same' (in {own}), 'nothing' (in {own})."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile = 'gpu'", "profile = 'gpu': no plugins.toml defines a profile. Define it as [profiles.gpu.index]."),
        (
            "profile = 'a b'",
            "profile = 'a b': no plugins.toml defines a profile. Define it as [profiles.\"a b\".index].",
        ),
        ("profiles.big = 'x'", "profiles.big = 'x': must be a table of settings, as [profiles.big.index]."),
        ("[profile.gpu.index]", "profile = {'gpu': {'index': {}}}: must be the name of a profile. Profiles are def"),
        ("profile = ['gpu']", "profile = ['gpu']: must be the name of a profile. Profiles are defined as [profiles"),
        ("profiles = 3", "profiles = 3: must be a table of profiles, as [profiles.gpu.index]."),
        ("profiles.gpu = 'x'", "profiles.gpu = 'x': must be a table of settings, as [profiles.gpu.index]."),
        ("profiles.gpu.profile = 'x'", "profiles.gpu.profile = 'x': there is no such key; known here: store, index."),
        ("profiles.gpu.index.bakend = 'x'", "profiles.gpu.index.bakend = 'x': there is no such key; did you mean 'ba"),
        ("[profiles.gpu.profiles.x]", "profiles.gpu.profiles = {'x': {}}: there is no such key; known here: store, i"),
    ],
)
def test_what_is_wrong_with_profiles_is_told_whether_one_is_chosen_or_not(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "plugins.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path, {})
    assert str(caught.value).startswith(f"{tmp_path / 'plugins.toml'}: {message}")
