"""The documents: their examples run, their commands parse, their links resolve, their tables say what is."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer.main
from transformers import BartConfig, BartForConditionalGeneration
from typer.testing import CliRunner

import memstore
from memstore import config, errors, models, registry
from memstore.cli import app
from tests import nested, tiny

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TREES = ("adapters/", "backends/", "bench/", "docs/", "examples/", "memstore/", "tests/")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(document: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Fenced blocks in these languages, each with the line it starts on."""
    text = document.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match[1] in languages:
            yield text.count("\n", 0, match.start(2)), match[2]


def prose(document: Path) -> str:
    """The text without fenced blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def spans(document: Path) -> list[str]:
    """What stands in `code spans`, outside fenced blocks."""
    return re.findall(r"`([^`]+)`", prose(document))


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """``from_pretrained`` makes tiny random models and a byte-level tokenizer, whatever the name."""

    def bart(name: str, **options: Any) -> BartForConditionalGeneration:
        torch.manual_seed(0)
        config = BartConfig(
            vocab_size=300,
            d_model=16,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            bos_token_id=256,
            eos_token_id=257,
            pad_token_id=257,
            decoder_start_token_id=257,
        )
        model = BartForConditionalGeneration(config)
        model.eval()
        return model

    made = {
        transformers.AutoModelForCausalLM: lambda name, **options: tiny.llama(),
        transformers.AutoModelForSeq2SeqLM: bart,
        transformers.AutoTokenizer: lambda name, **options: tiny.tokenizer(),
    }
    for auto, make in made.items():
        monkeypatch.setattr(auto, "from_pretrained", make)


@every_document
def test_python_examples_run(
    document: Path, tiny_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All examples of a document, one after the other, as a reader would run them."""
    monkeypatch.chdir(tmp_path)
    for name in ("esther", "ruth"):
        Path(f"{name}.txt").write_text(f"And it came to pass that {name} was a woman of that land.\n" * 30)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(document, "python"):
        exec(compile("\n" * line + code, str(document), "exec"), namespace)


EXAMPLES = [code for _, code in blocks(ROOT / "README.md", "python")]


@pytest.mark.parametrize("nth", range(1, len(EXAMPLES)))
def test_examples_of_the_readme_go_on_from_the_first_one(
    nth: int, tiny_models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("esther.txt").write_text("And it came to pass that Esther was a queen of that land.\n" * 30)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for code in (EXAMPLES[0], EXAMPLES[nth]):
        exec(compile(code, "README.md", "exec"), namespace)


def test_the_command_lines_of_the_readme_work_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_directory: Path
) -> None:
    """But for the demo, which has tests of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda name, dtype: (tiny.llama(), tiny.tokenizer()))
    Path("books").mkdir()
    for name in ("esther", "ruth", "books/tobit"):
        Path(f"{name}.txt").write_text(f"And it came to pass that {name} was of that land.\n" * 30)
    (code,) = [code for _, code in blocks(ROOT / "README.md", "sh") if "memstore index" in code]
    lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    assert len(lines) > 10 and {words[0] for words in lines} == {"memstore"}
    for words in lines:
        if words[1:] != ["demo"]:
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (words, result.output)
    with memstore.open("shelf", "r") as store, memstore.open("another", "r") as other:
        assert (store.names(), other.names()) == (["esther", "tobit"], ["esther"])


def test_the_bar_that_is_shown_follows_the_progress() -> None:
    (code,) = [code for _, code in blocks(ROOT / "README.md", "python") if "tqdm" in code]
    seen = []

    class Store:
        def encode(self, *document: Any, progress: Any, **options: Any) -> None:
            for done in (300, 640, 1000):  # an interrupted reading had done 300
                progress(done, 1000)
                seen.append((namespace["bar"].n, namespace["bar"].total))

    namespace: dict[str, Any] = {"store": Store(), "model": None, "tokenizer": None, "book": ""}
    exec(compile(code, "README.md", "exec"), namespace)
    assert seen == [(300, 1000), (640, 1000), (1000, 1000)]


def test_the_contract_kits_pass_as_contributing_says(tmp_path: Path) -> None:
    code = [code for _, code in blocks(ROOT / "CONTRIBUTING.md", "python")]
    (tmp_path / "test_contributing.py").write_text("\n".join(code))
    recorder = nested.Recorder()
    arguments = ["--import-mode=prepend", f"--rootdir={tmp_path}", "-k", "not another_process"]  # which takes seconds
    assert recorder.run(tmp_path / "test_contributing.py", *arguments) == 0
    assert {nested.class_of(report) for report in recorder.reports} == {"TestChunkedIndex", "TestT5"}


@every_document
def test_command_lines_parse(document: Path) -> None:
    command: Any = typer.main.get_command(app)
    commands = command.commands
    for _, code in blocks(document, "sh", "console"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["memstore"]:
                parse(command, words)
    for span in spans(document):
        if named := re.match(r"memstore ([a-z]+)", span):
            assert named[1] in commands, span


def parse(command: Any, words: list[str]) -> None:
    """Parse a command line, as far as the innermost command, without running anything."""
    context = command.make_context(words[0], words[1:])
    if hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        parse(command.commands[rest[0]], rest)


@every_document
def test_make_targets_exist(document: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    code = "\n".join([*(block for _, block in blocks(document, "sh")), *spans(document)])
    assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= set(targets)


@every_document
def test_links_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            assert link.startswith("https://"), link
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link


@every_document
def test_paths_and_tests_that_are_named_exist(document: Path) -> None:
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for span in spans(document):
        if span.startswith(TREES) and "<" not in span:
            assert (ROOT / span).exists(), span
        if re.fullmatch(r"test_\w+", span):
            assert f"def {span}(" in tests, span


CONFIGURATION = [code for _, code in blocks(ROOT / "docs" / "configuration.md", "toml")]


@pytest.mark.usefixtures("user_directory")
@pytest.mark.parametrize("code", CONFIGURATION, ids=range(len(CONFIGURATION)))
def test_configurations_that_are_shown_are_valid(code: str, tmp_path: Path) -> None:
    (tmp_path / "plugins.toml").write_text(code)
    for profile in [None, *tomllib.loads(code).get("profiles", {})]:
        config.load(tmp_path, {} if profile is None else {"MEMSTORE__PROFILE": profile})


def test_the_page_of_settings_shows_all_defaults() -> None:
    assert tomllib.loads(CONFIGURATION[0]) == tomllib.loads(config.DEFAULTS.read_text())


@pytest.mark.parametrize("group", [registry.BACKENDS, registry.ADAPTERS])
def test_the_readme_lists_every_plugin(group: str) -> None:
    rows = {row[0]: row[1] for row in re.findall(r"^\| `([\w-]+)` \|(.*)$", prose(ROOT / "README.md"), re.MULTILINE)}
    for plugin in registry.plugins(group):
        if plugin.distribution == "memstore-attention":
            known = getattr(registry.load(group, plugin.name), "model_types", ())
            assert {f"`{model_type}`" for model_type in known} <= set(re.findall(r"`[\w-]+`", rows.pop(plugin.name)))


@pytest.mark.parametrize("page", ["errors", "families"])
def test_a_generated_page_is_up_to_date(page: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / f"{page}.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["render"](), f"run docs/{page}.py"


# What may begin the sentence that says what to do.
ORDERS = set(
    "Attach Change Check Choose Correct Encode Expect Free Give Install Leave Load Name Open Remove Run Store Use Wait "
    "Write Ask".split()
)


ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_has_a_cause_and_a_cure(cls: type) -> None:
    """The first sentence of its docstring is the cause; another one, or a half of one, orders what to do."""
    cause, *rest = re.split(r"(?<=[.:;]) ", " ".join((cls.__doc__ or "").split()))
    assert cause[-1] in ".:" and not set(cause.split()[:1]) & ORDERS
    assert {sentence.split()[0].capitalize() for sentence in rest} & ORDERS or cls is errors.MemstoreError
    assert cls.__doc__ not in {base.__doc__ for base in cls.__bases__}


def test_every_error_is_raised_somewhere() -> None:
    files = [file for folder in ("memstore", "adapters", "backends") for file in (ROOT / folder).rglob("*.py")]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    used = {part.id for call in calls for part in (call.func, *call.args) if isinstance(part, ast.Name)}
    assert {cls.__name__ for cls in ERRORS} - used == {"MemstoreError"}


def test_a_picture_shows_what_a_command_prints() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "picture.py"))["draw"](["plugins"])
    assert picture.startswith("<svg") and "memstore-attention" in picture
    assert "url(http" not in picture and 'url("http' not in picture  # it loads nothing


@every_document
def test_no_figure_is_still_to_be_filled_in(document: Path) -> None:
    assert not re.findall(r"\{[A-Z][A-Z_]+\}", document.read_text(encoding="utf-8"))


def test_what_is_claimed_of_pass_keys_was_measured() -> None:
    """The counts are those of the trials, no seed is one for development, and the bounds hold that bench/README.md
    names."""
    results = runpy.run_path(str(ROOT / "bench/report_decoder_only.py"))["load_passkeys"]()
    lengths = [result["length"] for result in results if result["model"] == "smollm2-135m-instruct in float32"]
    assert lengths == [8192, 32768, 131_072, 262_144]
    for result in results:
        trials = result["results"]
        assert result["seed"] < 1000 and result["trials"] == len(trials) >= 20
        assert result["rank_0"] == sum(trial["rank"] == 0 for trial in trials)
        assert result["chosen"] == sum(trial["chosen"] for trial in trials) >= 0.95 * len(trials)
        for way in ("memory", "pasted", "ceiling", "oracle"):
            assert result[f"right_{way}"] == sum(trial["key"] in trial[way] for trial in trials)
        assert result["right_memory"] >= result["right_pasted"]
        assert result["right_memory"] >= 0.9 * result["right_ceiling"]


def test_the_published_tables_are_those_of_the_benches() -> None:
    published = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    for table in runpy.run_path(str(ROOT / "bench/report.py"))["tables"]():
        assert table in published, "run bench/report.py"


def test_what_is_claimed_of_decoding_was_measured() -> None:
    """The bounds that bench/README.md names, held against the figures."""
    result = json.loads((ROOT / "bench/results/decode.json").read_text())
    steps, found = result["reader"]["steps"], result["reader"]["retrieval"]
    for row in [*steps.values(), *found]:
        assert row["steps"] >= 5
        assert row["ratio"] == pytest.approx(row["cpu_ms"] / steps["plain"]["cpu_ms"], abs=0.02)
        assert 0 <= row.get("worst", 0) <= row.get("worst_head", 0) <= row.get("mass", 0) <= 1
    assert steps["all, bfloat16"]["ratio"] <= 8
    assert min(row["ratio"] for row in found if row["mass"] >= 0.99) <= 2.5
    base = {(row["tokens"], row["batch"], row["beams"]): row["exact"]["cpu_ms"] for row in result["base"]}
    for n in (10_000, 100_000, 1_000_000):
        assert base[n, 8, 1] <= 4 * base[n, 1, 1] and base[n, 1, 4] <= 3 * base[n, 1, 1]  # not 8 and 4 times as much
    attach = {row["tokens"]: row["attach_wall"] for row in result["attach"]}
    assert max(attach.values()) <= 0.2 and attach[1_000_000] <= 1.5 * attach[10_000]


def test_what_is_claimed_of_the_indexes_was_measured() -> None:
    """The bounds that bench/README.md names, held against every figure they speak of."""
    results = {result["dataset"]: result for result in runpy.run_path(str(ROOT / "bench/report.py"))["load"]()}

    def best(dataset: str, n: int, backend: str, dtype: str, k: int = 256) -> float:
        """CPU ms of the cheapest search that reaches 99 % of the mass."""
        (size,) = [size for size in results[dataset]["sizes"] if size["n"] == n]
        rows = [row for row in size["searches"] if (row["backend"], row["dtype"], row["k"]) == (backend, dtype, k)]
        return min(float(row["cpu_ms"]) for row in rows if row["share"] >= 0.99)

    assert best("mixed/512", 200_000, "faiss-flat", "float32") >= 4 * best("mixed/512", 200_000, "exact", "bfloat16")
    heads = {name for name in results if name.startswith("smollm2/")}
    for dtype in ("float32", "bfloat16"):
        gain = {head: best(head, 992_594, "exact", dtype) / best(head, 992_594, "faiss-ivf", dtype) for head in heads}
        assert {head for head in heads if gain[head] < 5} == {"smollm2/14.0", "smollm2/14.2"}
    assert len(heads) == 6
    for result in results.values():
        for size in result["sizes"]:
            for row in size["searches"]:
                assert 0 <= row["mass"] <= 1
                if row["dtype"] == "float32" and row["backend"] in ("exact", "faiss-flat"):
                    assert min(row["recall"], row["share"]) > 0.9999  # near ties may fall either way
            for build in size["builds"]:
                if build["backend"] in ("exact", "faiss-flat") and size["n"] >= 100_000:
                    vectors = size["n"] * size["d"] * (4 if build["dtype"] == "float32" else 2)
                    assert build["peak_of_vectors"] < 1.3 or vectors < 100e6
                    indexes = 90 if result["dataset"].startswith("smollm2/") else 1  # 30 layers of 3 heads
                    if cost := result["encode_cpu_s_per_token"]:
                        assert indexes * build["cpu_s"] <= 0.05 * size["n"] * cost


def test_what_is_claimed_of_the_trained_reader_was_measured() -> None:
    """The bounds that bench/README.md names for documents longer than the window."""
    result = runpy.run_path(str(ROOT / "bench/report.py"))["load_reader"]()
    plain, lengths = result["plain"], result["lengths"]
    assert [row["length"] for row in lengths] == [result["window"] * 2**i for i in range(11)]
    for row in lengths:
        assert row["trials"] >= (100 if row["length"] <= 16384 else 20)
        for way in (row["truncated"], row["memory_all"], row["memory_256"]):
            assert way["accuracy"] == round(way["right"] / row["trials"], 4) <= way["digits"]
            low, high = way["interval"]
            assert 0 <= low <= way["accuracy"] <= high <= 1
        if row["length"] > result["window"]:
            in_sight = result["window"] / row["length"]  # how often a needle is in the first window
            low, high = row["truncated"]["interval"]
            assert low <= in_sight + 0.01
        for way in ("memory_all", "memory_256"):
            assert row[way]["accuracy"] >= plain["accuracy"] - 0.05


def test_the_score_of_questions_without_an_answer_is_as_good_as_published() -> None:
    """The figures that bench/README.md names, reckoned anew from the scores of all questions."""
    result = json.loads((ROOT / "bench/results/answerable.json").read_text())
    scores: dict[tuple[str, bool], list[float]] = {}
    for row in result["rows"]:
        scores.setdefault((row["set"], row["answerable"]), []).append(row["scores"]["coverage"])
    assert {key: len(mine) for key, mine in scores.items()} == {
        ("development", True): 31,
        ("development", False): 31,
        ("near", False): 16,
        ("held-out", True): 20,
        ("held-out", False): 20,
    }
    for kind, answered in (("development", "development"), ("near", "development"), ("held-out", "held-out")):
        pairs = [(a > u) + (a == u) / 2 for a in scores[answered, True] for u in scores[kind, False]]
        assert sum(pairs) / len(pairs) == pytest.approx(result["summary"]["coverage"][kind]["auc"], abs=1e-3)
    passing = {key: sum(score >= 0.4 for score in mine) for key, mine in scores.items()}
    assert passing["development", False] <= 0.1 * 31
    assert (passing["held-out", True], passing["held-out", False], passing["near", False]) == (20, 4, 11)
    attention = [kinds["held-out"]["auc"] for name, kinds in result["summary"].items() if name != "coverage"]
    assert len(attention) == 5 and max(attention) < 0.7 < result["summary"]["coverage"]["near"]["auc"]


def test_what_is_claimed_of_choosing_was_measured() -> None:
    """A token costs no more for being written beside a longer memory, within what bench/README.md says."""
    seconds = json.loads((ROOT / "bench/results/choose.json").read_text())["cpu_and_wall_seconds"]
    assert seconds["token/262144"][0] <= 1.3 * seconds["token/16384"][0]
