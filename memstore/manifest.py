"""What is known of a memory, kept in the catalog as msgpack."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgpack
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from memstore.errors import DocumentError, FormatError

# A version reads every format of its major, and of a newer minor what has nothing in it that it does not know: a memory
# that has is refused by name, the others of its store are read. 1.1: parts in int8 and int4. 1.2: anchors.
FORMAT_MAJOR, FORMAT_MINOR = 1, 2

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
CODED_BITS = {"int8": 8, "int4": 4}  # of which int4 has an offset beside each scale
GROUP = 64  # rows of a record that share the scale of a channel: a block of memstore.reading.selection
SCALE_BYTES = 2  # bfloat16, which has the range of float32


# What a catalog may make a process count or hold, whoever wrote it: offsets and ids are 32 bits wide.
Count = Annotated[int, Field(gt=0, lt=2**31)]
MOST_NUMBERS = 1 << 20  # of a token in one part: 30 times what the largest models have
MOST_BYTES = 16 << 20  # of a manifest: a list reads all of them
LAST_SECOND = 253_370_764_800  # of the year 9998, up to which every platform can write a date


def storable(kind: str) -> tuple[str, ...]:
    """The dtypes that a memory of this kind may be stored in: keys and values may be coded, other vectors not."""
    return (*ITEM_BYTES, *(CODED_BITS if kind == "kv" else ()))


class PartSpec(BaseModel):
    """One array of a memory: ``shape`` is that of one token, such as (d,) or (num_kv_heads, head_dim).

    scales: what shares a scale where dtype is "int8" or "int4": GROUP rows in one "channel", or the channels (the last
    dimension) of one "token"; None elsewhere. See :mod:`memstore.coding`. every: how many tokens one row stands for; 1
    for all parts but summaries.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Annotated[tuple[Count, ...], Field(max_length=8)]
    dtype: Literal["float32", "float16", "bfloat16", "int8", "int4"]
    scales: Literal["channel", "token"] | None = None
    every: Count = 1

    @field_validator("shape")
    @classmethod
    def _is_that_of_a_token(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > MOST_NUMBERS:
            raise ValueError(f"must not be of more than {MOST_NUMBERS} numbers a token")
        return shape

    @property
    def is_coded(self) -> bool:
        """Whether rows are kept as small whole numbers with scales."""
        return self.dtype in CODED_BITS

    @property
    def prefix(self) -> PartSpec:
        """How the rows of the prefix are kept: few, the sink among them, and so not coded."""
        return PartSpec(shape=self.shape, dtype="bfloat16") if self.is_coded else self

    def num_rows(self, num_tokens: int) -> int:
        """The rows that so many tokens take; the last one may stand for fewer tokens."""
        return -(-num_tokens // self.every)

    def num_scales(self, rows: int) -> int:
        """Scales of a record of so many rows."""
        if self.scales == "token":
            return rows * math.prod(self.shape[:-1])
        return -(-rows // GROUP) * math.prod(self.shape)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a record that stands for so many tokens."""
        rows, values = self.num_rows(num_tokens), math.prod(self.shape)
        if not self.is_coded:
            return rows * values * ITEM_BYTES[self.dtype]
        tables = 2 if self.dtype == "int4" else 1
        return tables * SCALE_BYTES * self.num_scales(rows) + rows * -(-values * CODED_BITS[self.dtype] // 8)


class WindowRule(BaseModel):
    """How a long document is cut: windows of ``window`` tokens, each stepping by ``window - overlap``.

    ``context`` says which tokens of an overlap are kept: "both" sides (an encoder sees left and right, so the middle
    is kept) or "left" (a decoder sees only what came before, so the end is kept).

    ``anchors``: how many tokens on either side of an anchor there are among which it stands out, or None where windows
    follow from positions alone: see :func:`memstore.windows.anchors`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: Count
    overlap: int = Field(ge=0, lt=2**31)
    context: Literal["both", "left"]
    anchors: Count | None = None


def _says_how_long_it_is(seal: dict[str, Any]) -> dict[str, Any]:
    if type(seal.get("nbytes")) is not int or seal["nbytes"] < 0:
        raise ValueError("must say how many bytes the records take")
    return seal


Seal = Annotated[dict[str, Any], AfterValidator(_says_how_long_it_is)]


class Manifest(BaseModel):
    """A memory's description. ``seal`` and ``digest`` are None until the memory is complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_major: int = FORMAT_MAJOR
    format_minor: int = FORMAT_MINOR
    id: str = Field(pattern=r"^[0-9a-f]{32}$")
    name: str
    created: float = Field(ge=0, lt=LAST_SECOND)
    kind: str
    adapter: str
    num_tokens: Count
    block_tokens: Count
    parts: dict[str, PartSpec]
    rule: WindowRule
    prefix_ids: tuple[int, ...] = ()  # read before every window and kept apart, as the sink
    closing_ids: tuple[int, ...] = ()  # what the chat template puts behind a prompt, which asks nothing
    lead_ids: tuple[int, ...] = ()  # read between the prefix and the first window, and not kept
    anchors: tuple[Count, ...] = ()  # tokens at which windows begin anew, ascending
    batch_size: int = Field(gt=0, lt=2**63)
    device: str
    fingerprint: dict[str, JsonValue]
    document_digest: str
    has_text: bool
    has_ids: bool
    metadata: dict[str, JsonValue] = {}
    digest: str | None = None
    seal: Seal | None = None

    @model_validator(mode="after")
    def _anchors_ascend(self) -> Manifest:
        places = (0, *self.anchors, self.num_tokens)
        if self.anchors and any(a >= b for a, b in pairwise(places)):
            raise ValueError("anchors do not ascend from the first token to the last")
        return self

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    @property
    def vector_bytes(self) -> int:
        """Bytes of all parts of all tokens, the prefix included."""
        return sum(
            (self.num_blocks - 1) * part.num_bytes(self.block_tokens)
            + part.num_bytes(self.tokens_of(self.num_blocks - 1))
            + (part.prefix.num_bytes(len(self.prefix_ids)) if part.every == 1 else 0)
            for part in self.parts.values()
        )

    def tokens_of(self, i: int) -> int:
        """Tokens of block ``i``: ``block_tokens``, but for the last one."""
        return min(self.block_tokens, self.num_tokens - i * self.block_tokens)

    def differing(self, other: Manifest, *ignored: str) -> list[str]:
        """The names of the fields in which another one says something else, but for those to be ignored."""
        own = set(ignored)
        mine, others = self.model_dump(exclude=own), other.model_dump(exclude=own)
        return [field for field in mine if _said(mine[field]) != _said(others[field])]

    def fields(self) -> dict[str, Any]:
        """What is written of it: what an older minor version does not know only where it is used."""
        fields = self.model_dump()
        for owner, unused in ((fields, ()), (fields["rule"], None)):
            if owner["anchors"] == unused:
                del owner["anchors"]
        return fields

    @classmethod
    def described(cls, fields: dict[str, Any]) -> Manifest:
        """A manifest of which a user chose the name and the metadata. Raises DocumentError for those that it cannot
        have."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise DocumentError(f"The document {fields['name']!r} cannot be described: {wrong}.") from error

    def pack(self) -> bytes:
        """Its bytes. Raises DocumentError for metadata that has none, or too many."""
        try:
            packed: bytes = msgpack.packb(self.fields())
        except (ValueError, OverflowError, TypeError) as error:
            raise DocumentError(f"The metadata of {self.name!r} cannot be kept: {error}.") from error
        if len(packed) > MOST_BYTES:
            raise DocumentError(
                f"The metadata of {self.name!r} is too large: with it, what is known of the memory takes {len(packed)} "
                f"bytes, and {MOST_BYTES} are the most. Keep it in a file, and note where."
            )
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Raises FormatError for what is no manifest, or one of a newer major format."""
        try:
            raw = msgpack.unpackb(data, strict_map_key=True)
            raw["format_major"]
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise _no_manifest(error) from error
        return cls.checked(raw)

    @classmethod
    def checked(cls, raw: dict[str, Any]) -> Manifest:
        """A manifest of these fields. Raises FormatError, as :meth:`unpack` does."""
        _check_major(raw)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            if isinstance(minor := raw.get("format_minor"), int) and minor > FORMAT_MINOR:
                raise FormatError(
                    f"Memory {raw.get('name')!r} has format {FORMAT_MAJOR}.{minor}, and something in it that this "
                    f"version of memstore, which writes {FORMAT_MAJOR}.{FORMAT_MINOR}, does not know. Install the "
                    "version that wrote it, or encode the document again."
                ) from error
            raise _not_valid(raw, error) from error


class Facts(BaseModel):
    """What a list of memories needs of each manifest. Reading these alone takes a thirtieth of the time where there are
    parts of many layers."""

    model_config = ConfigDict(frozen=True)

    name: str
    created: float = Field(ge=0, lt=LAST_SECOND)
    kind: str
    num_tokens: Count
    fingerprint: dict[str, Any]
    metadata: dict[str, Any]
    seal: Seal

    @classmethod
    def unpack(cls, data: bytes) -> Facts:
        """From the manifest of a complete memory. Raises FormatError as :meth:`Manifest.unpack` does, but for what is
        wrong in the rest of it."""
        raw = _some(data, _TOLD)
        _check_major(raw)
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise _not_valid(raw, error) from error


def name_of(data: bytes) -> str:
    """The name in a packed manifest. Raises FormatError for what is no manifest, or one of another major format."""
    raw = _some(data, {"format_major", "format_minor", "name"})
    _check_major(raw)
    if not isinstance(raw.get("name"), str):
        raise _no_manifest(ValueError("it has no name"))
    return str(raw["name"])


def id_of(data: bytes) -> str:
    """The id in a packed manifest, also in one that a newer version wrote. Raises FormatError for what is none."""
    raw = _some(data, {"id"})
    if "id" not in raw:
        raise _no_manifest(ValueError("it has no id"))
    return str(raw["id"])


def _some(data: bytes, wanted: Collection[str]) -> dict[str, Any]:
    """These fields of a packed manifest, which is read no further than the last of them."""
    raw: dict[str, Any] = {}
    try:
        unpacker = msgpack.Unpacker(strict_map_key=True)
        unpacker.feed(data)
        for _ in range(unpacker.read_map_header()):
            field = unpacker.unpack()
            if field in wanted:
                raw[field] = unpacker.unpack()
                if len(raw) == len(wanted):
                    break
            else:
                unpacker.skip()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _no_manifest(error) from error
    return raw


def _said(value: Any) -> str:
    """A value in words that are equal for equal ones: a number that is none (NaN) does not equal itself."""
    return json.dumps(value, sort_keys=True)


_TOLD = {*Facts.model_fields, "format_major", "format_minor"}


def _check_major(raw: dict[str, Any]) -> None:
    major = raw.get("format_major")
    if major != FORMAT_MAJOR:
        raise FormatError(
            f"Memory {raw.get('name')!r} has format {major}.{raw.get('format_minor')}; this version of memstore "
            f"reads format {FORMAT_MAJOR}. Install the version that wrote it, or encode the document again."
        )


def _no_manifest(error: Exception) -> FormatError:
    return FormatError(f"The catalog holds a record that is no manifest ({error}).")


def _not_valid(raw: dict[str, Any], error: ValidationError) -> FormatError:
    if not isinstance(raw.get("name"), str):
        return _no_manifest(error)
    return FormatError(
        f"The manifest of memory {raw.get('name')!r} is not valid: {error}. Restore the store from a copy, or remove "
        "the memory and encode its document again."
    )
