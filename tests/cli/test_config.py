"""``memstore config show``, and ``--profile`` before any command."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cli.conftest import Run
from tests.tables import tables

pytestmark = pytest.mark.usefixtures("user_directory")

PROJECT = """
profile = "gpu"

[store]
path = "li [b]brary"

[profiles.gpu.index]
backend = "faiss-nowhere"
options = {nprobe = 8, limit = inf, day = 2020-01-02, sizes = [{"a b" = 1}]}

[profiles.plain.store]
path = "plain"
"""


ODD = "\x7f\x00\r\n\t\"\\' é🙂\u2028[b] #.="


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugins.toml of a project in which the commands run."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MEMSTORE__")]:
        monkeypatch.delenv(name)
    file = tmp_path / "plugins.toml"
    file.write_text(PROJECT)
    return file


def test_show_names_the_origin_of_every_value(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE__INDEX__AUTO__TARGET_MASS", "0.95")
    assert (
        run("config", "show", "--origin").stdout
        == f"""\
# profile gpu, chosen by {file}

[store]
path = "li [b]brary" # {file}
records = "lmdb" # defaults

[index]
backend = "faiss-nowhere" # {file} [profiles.gpu]

[index.options]
nprobe = 8 # {file} [profiles.gpu]
limit = inf # {file} [profiles.gpu]
day = 2020-01-02 # {file} [profiles.gpu]
sizes = [{{"a b" = 1}}] # {file} [profiles.gpu]

[index.auto]
exact_tokens = 200000 # defaults
target_mass = 0.95 # MEMSTORE__INDEX__AUTO__TARGET_MASS
small = "exact" # defaults
"""
    )


def test_what_is_shown_is_a_complete_configuration(run: Run, file: Path) -> None:
    shown = run("config", "show").stdout
    assert tomllib.loads(shown)["index"]["options"] == tomllib.loads(PROJECT)["profiles"]["gpu"]["index"]["options"]
    file.write_text(shown)
    assert run("config", "show").stdout == shown.removeprefix("# profile gpu\n\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(tables, st.text(max_size=5))
@example({"a": [{"a": {}}]}, "")
@example({ODD: {ODD: [ODD, {ODD: {ODD: ODD}}]}, "": {"": {}}}, ODD)
def test_whatever_is_configured_is_shown_as_it_is(run: Run, file: Path, options: dict[str, Any], profile: str) -> None:
    """The comments name the profile, whatever characters it has."""
    table = {"profile": profile, "profiles": {profile: {"index": {"options": options}}}}
    file.write_bytes(tomlkit.dumps(table).encode())
    shown = tomllib.loads(run("config", "show", "--origin").stdout)
    assert shown["index"].pop("options") == options
    assert shown == {
        "store": {"path": "library", "records": "lmdb"},
        "index": {"backend": "exact", "auto": {"exact_tokens": 200_000, "target_mass": 0.99, "small": "exact"}},
    }


def test_a_path_that_is_no_text_is_shown_all_the_same(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTORE__STORE__PATH", "a\udcff")
    assert tomllib.loads(run("config", "show", "--origin").stdout)["store"]["path"] == "a?"


def test_show_json(run: Run, file: Path) -> None:
    document = json.loads(run("config", "show", "--json").stdout)
    assert document == {
        "profile": "gpu",
        "configuration": {
            "store": {"path": "li [b]brary", "records": "lmdb"},
            "index": {
                "backend": "faiss-nowhere",
                "options": {"nprobe": 8, "limit": "Infinity", "day": "2020-01-02", "sizes": [{"a b": 1}]},
                "auto": {"exact_tokens": 200000, "target_mass": 0.99, "small": "exact"},
            },
        },
    }
    with_origins = json.loads(run("config", "show", "--json", "--origin").stdout)
    origins = with_origins.pop("origins")
    assert with_origins == document
    assert origins["index.options.sizes"] == f"{file} [profiles.gpu]"
    assert (origins["profile"], origins["store.records"]) == (str(file), "defaults")
    assert len(origins) == 11


def test_an_empty_table_has_an_origin_too(run: Run, file: Path) -> None:
    shown = run("--profile", "plain", "config", "show", "--origin").stdout
    assert "\n[index.options] # defaults\n" in shown
    assert shown.startswith("# profile plain, chosen by command line\n")
    assert f'path = "plain" # {file} [profiles.plain]\n' in shown
    assert "MEMSTORE__PROFILE" not in os.environ
    assert run("config", "show").stdout.startswith("# profile gpu\n")


def test_the_store_of_the_command_line_lies_above_all(run: Run, file: Path) -> None:
    shown = run("--profile", "plain", "config", "show", "--origin", "--store", "other").stdout
    assert 'path = "other" # command line\n' in shown


@pytest.mark.parametrize("arguments", [["config", "show"], ["list"]])
def test_a_profile_that_does_not_exist_is_one_message(run: Run, file: Path, arguments: list[str]) -> None:
    result = run("--profile", "gup", *arguments, "--json")
    message = (
        "command line: profile = 'gup': there is no such profile; did you mean 'gpu'? "
        f"Defined: 'gpu' (in {file}), 'plain' (in {file})."
    )
    assert result.exit_code == 1
    assert result.stderr == f"Error: {message}\n"
    assert json.loads(result.stdout) == {"error": message}


def test_the_profile_of_the_command_line_configures_a_command(run: Run, file: Path, library: Path) -> None:
    library.rename("elsewhere")
    file.write_text('[profiles.p.store]\npath = "elsewhere"\n')
    assert run("list").exit_code == 1
    assert "genesis" in run("--profile", "p", "list").stdout
    file.write_text('[profiles.p.store]\nrecords = "exact"\n')
    assert "plugins.toml: profiles.p.store.records = 'exact': " in run("--profile", "p", "list").stderr


def test_names_and_paths_of_several_lines_are_quoted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a\nb"
    folder.mkdir()
    (folder / "plugins.toml").write_text('profile = "x\\ny"\n[profiles."x\\ny".store]\npath = "a"\n')
    monkeypatch.chdir(folder)
    shown = run("config", "show", "--origin").stdout
    assert tomllib.loads(shown)["store"]["path"] == "a"
    assert shown.startswith("# 'profile x\\ny, chosen by ")


def test_a_broken_file_is_one_message(run: Run, file: Path) -> None:
    file.write_text("[store")
    result = run("config", "show")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {file}: is not valid TOML: ")
