"""Read the weights of a CTranslate2 model file.

The file is little-endian: format version, name and revision of the model's specification, then a count and that many
variables (name, rank, dimensions, type, size in bytes, data), then a count and that many aliases (name, name of the
variable it stands for). A string is its length with the closing NUL in 2 bytes, then its bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FORMAT_VERSION = 6
MAX_RANK = 8
DTYPES: dict[int, npt.DTypeLike] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


class FormatError(Exception):
    """The bytes are not a model file that this reader knows."""


@dataclass(frozen=True)
class CTranslate2Model:
    """What a model file holds; `variables` has the aliases too, as the same arrays."""

    spec: str
    revision: int
    variables: dict[str, Array]
    aliases: dict[str, str]


class _Reader:
    """A position in `data` that never passes its end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes."""
        end = self.position + size
        if end > len(self.data):
            raise FormatError(f"{size} bytes wanted at {self.position}, {len(self.data) - self.position} are left")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def integer(self, size: int) -> int:
        """Return the next unsigned integer of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def string(self) -> str:
        """Return the next string."""
        raw = bytes(self.take(self.integer(2)))
        if not raw.endswith(b"\0"):
            raise FormatError(f"string without its closing NUL before {self.position}")
        try:
            return raw[:-1].decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"string before {self.position} is not UTF-8") from error

    def array(self) -> Array:
        """Return the next variable's data; size, shape and type must agree."""
        rank = self.integer(1)
        if rank > MAX_RANK:
            raise FormatError(f"rank {rank} before {self.position}")
        shape = struct.unpack(f"<{rank}I", self.take(4 * rank))
        code, size = self.integer(1), self.integer(4)
        if code not in DTYPES:
            raise FormatError(f"unknown data type {code} before {self.position}")
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        if size != math.prod(shape) * dtype.itemsize:
            raise FormatError(f"{size} bytes for shape {shape} of {dtype} before {self.position}")
        return np.frombuffer(self.take(size), dtype=dtype).reshape(shape)


def read_model(path: Path) -> CTranslate2Model:
    """Return what the model file at `path` holds; raise `FormatError` for anything that does not add up."""
    return parse_model(path.read_bytes())


def parse_model(data: bytes) -> CTranslate2Model:
    """Return what the bytes of a model file hold."""
    reader = _Reader(memoryview(data))
    version = reader.integer(4)
    if version != FORMAT_VERSION:
        raise FormatError(f"format version {version}; {FORMAT_VERSION} is known")
    spec, revision = reader.string(), reader.integer(4)
    variables: dict[str, Array] = {}
    for _ in range(reader.integer(4)):
        name = reader.string()
        if name in variables:
            raise FormatError(f"variable {name} twice")
        variables[name] = reader.array()
    aliases: dict[str, str] = {}
    for _ in range(reader.integer(4)):
        alias, name = reader.string(), reader.string()
        if alias in variables or name not in variables:
            raise FormatError(f"alias {alias} of {name}")
        aliases[alias] = name
    if reader.position != len(data):
        raise FormatError(f"{len(data) - reader.position} bytes after the end")
    variables.update({alias: variables[name] for alias, name in aliases.items()})
    return CTranslate2Model(spec, revision, variables, aliases)
