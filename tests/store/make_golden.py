"""Write a small store of the format that the memstore on the path writes, as ``tests/store/golden/<version>.zip``.

PYTHONPATH=… python tests/store/make_golden.py [FOLDER]     to be run once for every version of the format

Every value follows from its place, so that a test needs nothing but this file to know them. It uses only what format
1.0 had already, but for what a later version added.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import memstore
from memstore.manifest import FORMAT_MAJOR, FORMAT_MINOR, Manifest, PartSpec, WindowRule
from memstore.memory import Document

TOKENS, BLOCK = 70, 64
TEXT = "Im Anfang war das Wort – und das Wort war bei Gott; alle Dinge sind durch es."[:TOKENS]
SCALE = 0.5  # as a bfloat16: the bytes 00 3f


def offsets() -> np.ndarray[Any, Any]:
    starts = np.arange(TOKENS, dtype=np.int32)
    return np.stack([starts, starts + 1], axis=1).astype(np.int32)


def hidden(start: int, stop: int) -> np.ndarray[Any, Any]:
    """float32 [stop - start, 4]."""
    return np.arange(start * 4, stop * 4, dtype=np.float32).reshape(-1, 4) / 8


def codes(start: int, stop: int) -> np.ndarray[Any, Any]:
    """int8 [stop - start, 1, 2], each times SCALE a number that is stored."""
    return (np.arange(start * 2, stop * 2) % 255 - 127).astype(np.int8).reshape(-1, 1, 2)


def parts(minor: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"hidden": PartSpec(shape=(4,), dtype="float32")}
    if minor >= 1:
        plain["coded"] = PartSpec(shape=(1, 2), dtype="int8", scales="token")
    return plain


def rule(minor: int) -> WindowRule:
    fields: dict[str, Any] = {"window": 16, "overlap": 8, "context": "left"}
    return WindowRule(**fields, **({"anchors": 32} if minor >= 2 else {}))


def write(store: Any, minor: int) -> None:
    later: dict[str, Any] = {"anchors": (33,)} if minor >= 2 else {}
    draft = Manifest(
        id=f"{minor:032x}",
        name="Wort",
        created=1.5,
        kind="hidden",
        adapter="none",
        num_tokens=TOKENS,
        block_tokens=BLOCK,
        parts=parts(minor),
        rule=rule(minor),
        prefix_ids=(7, 8),
        batch_size=4,
        device="cpu",
        fingerprint={"model_type": "none", "config.d_model": 4},
        document_digest="0" * 32,
        has_text=True,
        has_ids=True,
        metadata={"author": "unknown", "year": 90},
        **later,
    )
    with store.create(draft, Document(TEXT, np.arange(TOKENS, dtype=np.int32), offsets())) as writer:
        # The prefix of a coded part is bfloat16: ones and zeros have the same bytes in every version of numpy.
        prefix: dict[str, Any] = {"hidden": hidden(0, 2).tobytes(), "coded": bytes.fromhex("803f0000") * 2}
        writer.put_prefix({part: prefix[part] for part in draft.parts})
        for start in range(0, TOKENS, BLOCK):
            stop = min(start + BLOCK, TOKENS)
            coded = bytes.fromhex("003f") * (stop - start) + codes(start, stop).tobytes()
            block: dict[str, Any] = {"hidden": hidden(start, stop).tobytes(), "coded": coded}
            writer.append({part: block[part] for part in draft.parts})
        writer.finish()


def main(folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "store"
        with memstore.open(path, records="lmdb") as store:
            write(store, FORMAT_MINOR)
        target = folder / f"{FORMAT_MAJOR}.{FORMAT_MINOR}.zip"
        with zipfile.ZipFile(target, "w") as packed:
            for file in sorted(path.rglob("*.mdb")):
                if file.name != "lock.mdb":
                    entry = zipfile.ZipInfo(file.relative_to(path).as_posix())
                    packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


if __name__ == "__main__":
    print(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden"))
