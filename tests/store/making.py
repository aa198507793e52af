"""Small memories whose every byte is known, made without a model."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from memstore.manifest import Manifest, PartSpec, WindowRule
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter
from memstore.store import MemoryStore

TOKENS, BLOCK = 300, 64
TEXT = "In the beginning… " * 17
ROOT = Path(__file__).parents[2]


def manifest(name: str = "esther", **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "name": name,
        "created": 1.5,
        "kind": "hidden",
        "adapter": "none",
        "num_tokens": TOKENS,
        "block_tokens": BLOCK,
        "parts": {"large": PartSpec(shape=(40,), dtype="float32"), "small": PartSpec(shape=(2, 3), dtype="bfloat16")},
        "rule": WindowRule(window=64, overlap=32, context="both"),
        "prefix_ids": (7, 8, 9),
        "batch_size": 1,
        "device": "cpu",
        "fingerprint": {"model": "none"},
        "document_digest": "0",
        "has_text": True,
        "has_ids": True,
        "metadata": {"author": "unknown", "year": None},
    }
    return Manifest(**{**fields, **changes})


def document() -> Document:
    starts = np.arange(TOKENS, dtype=np.int32)
    offsets = np.stack([starts, starts + 1], axis=1).astype(np.int32)
    offsets[[0, -1]] = 0  # special tokens
    return Document(TEXT, np.arange(1000, 1000 + TOKENS, dtype=np.int32), offsets)


def rows(part: str, start: int, stop: int) -> np.ndarray[Any, Any]:
    """What the part holds of these tokens: "large" as float32 [n, 40], "small" as the bits of bfloat16 [n, 2, 3]."""
    width, dtype = (40, np.float32) if part == "large" else (6, np.uint16)
    values = (np.arange(start * width, stop * width) % 30011).astype(dtype)
    return values.reshape(-1, 40) if part == "large" else values.reshape(-1, 2, 3)


def append(writer: MemoryWriter) -> None:
    """Append the next block."""
    start = writer.num_done
    stop = min(start + BLOCK, TOKENS)
    writer.append({part: rows(part, start, stop).data for part in ("large", "small")})


def fill(writer: MemoryWriter) -> Memory:
    """Append all blocks that are missing, and finish."""
    writer.put_prefix({part: rows(part, 0, 3).data for part in ("large", "small")})
    while writer.num_done < TOKENS:
        append(writer)
    return writer.finish()


def write(store: MemoryStore, name: str = "esther", **changes: Any) -> Memory:
    with store.create(manifest(name, **changes), document()) as writer:
        return fill(writer)


def check(memory: Memory, verify: Any = "lazy") -> None:
    """Compare every value of the memory with what ``write`` wrote."""
    import torch

    assert memory.text == TEXT
    np.testing.assert_array_equal(memory.token_ids, document().token_ids)
    np.testing.assert_array_equal(memory.offsets, document().offsets)
    with memory.open(verify) as opened:
        for part in ("large", "small"):
            for actual, start, stop in (
                (opened.rows(part, 0, TOKENS), 0, TOKENS),
                (torch.cat(opened.blocks(part)), 0, TOKENS),
                (opened.prefix(part), 0, 3),
            ):
                bits = actual if part == "large" else actual.view(torch.uint16)
                np.testing.assert_array_equal(bits.numpy(), rows(part, start, stop))


def contents(memory: Memory, verify: Any = "open") -> dict[bytes, bytes]:
    """Every value of a memory, byte for byte."""
    with memory.open(verify) as opened:
        return {key: opened.value(key).tobytes() for key in opened.keys}


def facts(memory: Memory) -> dict[str, Any]:
    """All that is known of it but for its place."""
    return memory.manifest.model_dump(exclude={"id", "seal"})


def child(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start Python code in another process, which can import what this one can."""
    paths = [str(ROOT), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def in_child(code: str, *arguments: object) -> str:
    """The output of Python code in another process, which must end well."""
    process = child(code, *arguments, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, f"exit status {process.returncode}: {errors}"
    return output
