"""The reader of CTranslate2 files takes what adds up and refuses everything else."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.real.ctranslate2 import FormatError, parse_model


def _string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def _variable(name: str, array: np.ndarray, code: int) -> bytes:
    shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    return _string(name) + shape + struct.pack("<BI", code, array.nbytes) + array.tobytes()


WEIGHT = np.arange(6, dtype=np.float16).reshape(2, 3)
HEADER = struct.pack("<I", 6) + _string("Spec") + struct.pack("<I", 3)
VARIABLES = struct.pack("<I", 2) + _variable("a/weight", WEIGHT, 4) + _variable("heads", np.array(6, np.int16), 2)
ALIASES = struct.pack("<I", 1) + _string("b/weight") + _string("a/weight")
MODEL = HEADER + VARIABLES + ALIASES


def test_a_model_is_read() -> None:
    model = parse_model(MODEL)
    assert (model.spec, model.revision, model.aliases) == ("Spec", 3, {"b/weight": "a/weight"})
    assert set(model.variables) == {"a/weight", "heads", "b/weight"}
    np.testing.assert_array_equal(model.variables["a/weight"], WEIGHT)
    assert model.variables["b/weight"] is model.variables["a/weight"]
    assert model.variables["heads"].shape == () and int(model.variables["heads"]) == 6


def test_a_file_cut_anywhere_is_refused() -> None:
    for size in range(len(MODEL)):
        with pytest.raises(FormatError):
            parse_model(MODEL[:size])


@pytest.mark.parametrize(
    "data",
    [
        MODEL + b"\0",
        struct.pack("<I", 5) + MODEL[4:],
        HEADER + struct.pack("<I", 2) + _variable("a", WEIGHT, 4) * 2 + struct.pack("<I", 0),
        HEADER + struct.pack("<I", 1) + _variable("a", WEIGHT, 0) + struct.pack("<I", 0),
        HEADER + struct.pack("<I", 1) + _variable("a", WEIGHT, 99) + struct.pack("<I", 0),
        HEADER + struct.pack("<I", 1) + _string("a") + b"\xff" + bytes(2000),
        HEADER + VARIABLES + struct.pack("<I", 1) + _string("b") + _string("missing"),
        MODEL.replace(b"Spec\0", b"Specs"),
        MODEL.replace(b"Spec\0", b"\xff\xff\xff\xff\0"),
    ],
    ids=["trailing", "version", "twice", "size", "type", "rank", "alias", "no NUL", "not UTF-8"],
)
def test_what_does_not_add_up_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_model(data)
