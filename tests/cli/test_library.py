"""``memstore list``, ``show``, ``remove``, ``verify`` and ``plugins``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memstore
from memstore.cli import common
from tests import kept
from tests.cli.conftest import GENESIS, Run
from tests.conftest import Distribution
from tests.store import making

TOKENS = len(GENESIS.encode())


def test_list_shows_every_memory(run: Run, library: Path) -> None:
    lines = run("list", "--store", library).stdout.splitlines()
    assert lines[0].split() == ["name", "tokens", "size", "kind", "model", "written"]
    assert lines[1].split()[:2] == ["genesis", f"{TOKENS:,}"]
    assert lines[2].startswith("ruth[1] ")


def test_list_takes_a_name_or_a_pattern(run: Run, library: Path) -> None:
    for pattern, names in (
        ("gen*", ["genesis"]),
        ("ruth[1]", ["ruth[1]"]),
        ("*", ["genesis", "ruth[1]"]),
        ("Gen*", []),
    ):
        memories = json.loads(run("list", pattern, "--store", library, "--json").stdout)["memories"]
        assert [memory["name"] for memory in memories] == names
    result = run("list", "Gen*", "--store", library)
    assert (result.exit_code, result.stdout) == (0, "No memory's name fits 'Gen*'.\n")


def test_list_json(run: Run, library: Path) -> None:
    memories = json.loads(run("list", "--store", library, "--json").stdout)["memories"]
    assert [memory["name"] for memory in memories] == ["genesis", "ruth[1]"]
    assert memories[0]["num_tokens"] == TOKENS
    assert memories[0]["kind"] == "kv"
    assert memories[0]["model"] == "LlamaForCausalLM"
    assert memories[0]["nbytes"] > TOKENS * 2 * 2 * 2 * 8 * 4


def test_what_is_unfinished_is_listed(run: Run, tmp_path: Path) -> None:
    with memstore.open(tmp_path / "store") as store:
        making.write(store)
        store.create(making.manifest("ruth"), making.document()).close()
    result = run("list", "--store", tmp_path / "store")
    assert "esther" in result.stdout and "ruth" not in result.stdout
    assert "Note: Unfinished: ruth. The command that began one goes on with it" in result.stderr
    for pattern, unfinished in (("r*", ["ruth"]), ("ruth", ["ruth"]), ("e*", [])):
        result = run("list", pattern, "--store", tmp_path / "store", "--json")
        assert json.loads(result.stdout)["unfinished"] == unfinished
    assert run("remove", "ruth", "--store", tmp_path / "store").stdout == "Removed ruth.\n"
    assert "Unfinished" not in run("list", "--store", tmp_path / "store").stderr


@pytest.mark.parametrize("name", ["ruth", "r*"])
def test_what_is_unfinished_is_told_where_it_is_asked_for(run: Run, tmp_path: Path, name: str) -> None:
    with memstore.open(tmp_path) as store:
        making.write(store)
        store.create(making.manifest("ruth"), making.document()).close()
    commands: list[tuple[str, ...]] = [("verify", name), ("export", name, str(tmp_path / "out"))]
    commands += [("generate", "--model", "/no/model", "--memory", name, "Who?")]
    commands += [] if name == "r*" else [("show", name), ("reindex", name), ("check", name, "--model", "/no/model")]
    for command in commands:
        result = run(*command, "--store", tmp_path)
        assert result.exit_code == 1 and f"no complete memory named '{name}'" in result.stderr
        assert "Unfinished: ruth. The command that began one goes on with it" in result.stderr
    assert run("remove", name, "--store", tmp_path).stdout == "Removed ruth.\n"
    assert run("list", "--store", tmp_path).stderr == ""


def test_an_empty_store(run: Run, tmp_path: Path) -> None:
    memstore.open(tmp_path, "a").close()
    assert run("list", "--store", tmp_path).stdout == "The store is empty.\n"
    assert json.loads(run("list", "--store", tmp_path, "--json").stdout) == {"memories": [], "unfinished": []}


def test_show(run: Run, library: Path) -> None:
    text = run("show", "genesis", "--store", library).stdout
    for fact in (
        f"{TOKENS}",
        "LlamaForCausalLM",
        "4 of float32 [2, 8] a token",
        "fingerprint: weights",
    ):
        assert fact in text
    facts = json.loads(run("show", "genesis", "--store", library, "--json").stdout)
    with memstore.open(library, "r") as store:
        assert facts["fingerprint"] == store["genesis"].fingerprint
        assert (facts["id"], facts["id"] in text) == (store["genesis"].manifest.id, True)
    assert (library / "memories" / facts["id"]).is_dir()
    assert facts["parts"]["bounds.0"]["every"] == 64
    assert facts["parts"]["keys.0"] == {"shape": [2, 8], "dtype": "float32", "scales": None, "every": 1}


@pytest.mark.parametrize("command", ["show", "remove", "verify"])
def test_an_unknown_name_is_an_error(run: Run, library: Path, command: str) -> None:
    result = run(command, "exodus", "--store", library)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert "'exodus'" in result.stderr


@pytest.mark.parametrize("arguments", [["list"], ["show", "x"], ["remove", "x"], ["verify"]])
def test_a_store_that_does_not_exist_is_not_created(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    result = run(*arguments, "--store", tmp_path / "nowhere", "--json")
    assert result.exit_code == 1
    assert str(tmp_path / "nowhere") in result.stderr.replace("\n", "")
    assert "nowhere" in json.loads(result.stdout)["error"]
    assert not (tmp_path / "nowhere").exists()


def test_remove_removes_what_it_can(run: Run, library: Path) -> None:
    result = run("remove", "exodus", "ruth[1]", "--store", library, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["removed"] == ["ruth[1]"]
    assert [failure["name"] for failure in document["failed"]] == ["exodus"]
    assert run("remove", "genesis", "--store", library).stdout == "Removed genesis.\n"
    assert run("list", "--store", library).stdout == "The store is empty.\n"


def test_remove_and_verify_take_patterns(run: Run, tmp_path: Path) -> None:
    with memstore.open(tmp_path) as store:
        for name in ("letter-1", "letter-2", "letter-[12]", "ruth"):
            making.write(store, name)
        store.create(making.manifest("letter-3"), making.document()).close()
        assert [result.name for result in store.verify("letter-?")] == ["letter-1", "letter-2"]
        assert [result.name for result in store.verify("letter-?", repair=True)] == ["letter-1", "letter-2"]
    intact = run("verify", "letter-[12]", "--store", tmp_path)  # a name, though also a pattern
    assert (intact.exit_code, intact.stdout) == (0, "letter-[12] is intact.\n")
    assert run("verify", "*-?", "--store", tmp_path).stdout == "letter-1 is intact.\nletter-2 is intact.\n"
    assert run("remove", "letter-[12]", "--store", tmp_path).stdout == "Removed letter-[12].\n"
    result = run("remove", "gospel-*", "letter-[13]", "--store", tmp_path, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["removed"]) == (1, ["letter-1", "letter-3"])
    assert [failure["name"] for failure in document["failed"]] == ["gospel-*"]
    assert "no memory named 'gospel-*', and none whose name fits it as a pattern." in document["failed"][0]["error"]
    assert run("verify", "gospel-*", "--store", tmp_path).exit_code == 1
    with memstore.open(tmp_path, "r") as store:
        assert (store.names(), store.unfinished()) == (["letter-2", "ruth"], [])


def test_verify_of_an_intact_store(run: Run, library: Path) -> None:
    assert run("verify", "--store", library).stdout == "genesis is intact.\nruth[1] is intact.\n"
    document = json.loads(run("verify", "genesis", "--store", library, "--json").stdout)
    whole = {"name": "genesis", "ok": True, "problems": [], "indexes": {}, "repaired": [], "unrepaired": []}
    assert document == {"memories": [whole], "mended": [], "strays": []}


def test_verify_finds_damage(run: Run, library: Path) -> None:
    with memstore.open(library, "r") as store:
        memory_id = store["genesis"].manifest.id
    (data,) = (path for path in library.rglob("*.mdb") if memory_id in path.parts)
    data.write_bytes(data.read_bytes().replace(b"In the beginning", b"in the beginning"))
    result = run("verify", "--store", library, "--json")
    assert result.exit_code == 1
    assert "genesis is damaged" in result.stderr
    assert result.stderr.count("verify --repair") == 1  # the way out, once
    assert result.stderr.endswith("with --model MODEL, the one that wrote it, damaged vectors too.\n")
    assert "--repair" not in run("verify", "ruth[1]", "--store", library).stderr
    assert [memory["ok"] for memory in json.loads(result.stdout)["memories"]] == [False, True]


def test_plugins(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.out, "_width", 200)  # a narrow table folds the names of third parties
    lines = [line.split() for line in run("plugins").stdout.splitlines()]
    assert lines[0] == ["name", "kind", "distribution", "version", "available"]
    assert ["llama", "adapter", "memstore-attention", memstore.__version__, "yes"] in lines
    found = {plugin["name"]: plugin for plugin in json.loads(run("plugins", "--json").stdout)["plugins"]}
    assert found["lmdb"] == {
        "name": "lmdb",
        "group": "memstore.backends",
        "distribution": "memstore-attention",
        "version": memstore.__version__,
        "value": "memstore_backends.lmdb_records:LmdbRecords",
        "kind": "records",
        "available": True,
        "missing": [],
        "install": None,
    }


def test_plugins_names_what_to_install_for_one_that_cannot_be_used(
    run: Run, distribution: Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.out, "_width", 200)  # a narrow table folds the names of third parties
    plugins = {"odd": "third_odd:Odd [odd]", "gone": "third_gone:Odd", "odder": "third_odder:Odd"}
    modules = {"third_odd": "import nowhere_at_all", "third_odder": "no Python"}
    distribution("third", "memstore.backends", plugins, modules)
    lines = {line.split()[0]: line.split(maxsplit=4)[4].strip() for line in run("plugins").stdout.splitlines()}
    assert lines["odd"] == 'no: pip install "third[odd]"'
    assert lines["gone"] == "no: reinstall third"
    assert lines["odder"] == "unknown"


def test_a_wrong_configuration_is_one_message(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins.toml").write_text('[store]\npth = "x"\n')
    monkeypatch.chdir(tmp_path)
    result = run("list")
    assert result.exit_code == 1
    assert "plugins.toml: store.pth = 'x': there is no such key; did you mean 'path'?" in result.stderr


def test_reindex_and_show(run: Run, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)
    assert json.loads(run("show", "genesis", "--store", library, "--json").stdout)["indexes"] == []
    done = run(
        "reindex", "genesis", "--store", library, "--backend", "kept", "--option", "scale=2", "--option", "step=4"
    )
    assert (done.exit_code, done.stdout.startswith("genesis: kept, built in ")) == (0, True)
    (index,) = json.loads(run("show", "genesis", "--store", library, "--json").stdout)["indexes"]
    assert (index["backend"], index["options"], index["tuned"]) == ("kept", {"scale": 2.0}, {"step": 4})
    assert "scale 2.0, step 4" in " ".join(run("show", "genesis", "--store", library).stdout.split())
    again = json.loads(run("reindex", "genesis", "--store", library, "--backend", "kept", "--json").stdout)
    assert (again["backend"], again["index"]["options"], again["index"]["tuned"]) == ("kept", {"scale": 1.0}, {})
    assert "nothing to keep" in run("reindex", "genesis", "--store", library).stdout
    assert json.loads(run("reindex", "genesis", "--store", library, "--json").stdout)["index"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--backend", "kepp"], 1, "Did you mean 'kept'"),
        (["--backend", "kept", "--option", "nprobe=3"], 1, "nprobe"),
        (["--backend", "kept", "--option", "step=0"], 1, "greater than 0"),
        (["--backend", "kept", "--option", "step"], 2, "KEY=VALUE"),
    ],
)
def test_a_wrong_reindex(
    run: Run,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)
    done = run("reindex", "genesis", "--store", library, *arguments)
    assert done.exit_code == code
    assert message in done.stderr


def test_reindexing_creates_no_store(run: Run, tmp_path: Path) -> None:
    assert run("reindex", "genesis", "--store", tmp_path / "nowhere").exit_code == 1
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", [("list",), ("verify",), ("remove", "esther")], ids=" ".join)
def test_a_store_that_ends_with_the_command_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MEMSTORE__STORE__RECORDS", "in-memory")
    result = run(*command, "--store", tmp_path / "store")
    assert result.exit_code == 1
    assert "store.records = 'in-memory' keeps nothing once a command has ended" in result.stderr
