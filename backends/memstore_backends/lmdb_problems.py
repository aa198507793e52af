"""What is wrong with an LMDB file, found without liblmdb, which a damaged page can crash."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import lmdb.verify

from memstore_backends.lmdb_pages import PageError, meta, page_size


def problem_of_metas(data: Path) -> str | None:
    """What is wrong with the two pages that it begins with, and with its length."""
    with data.open("rb") as file:
        try:
            size = page_size(file.fileno())
            metas = [meta(os.pread(file.fileno(), size, number * size), number) for number in (0, 1)]
        except (PageError, struct.error) as error:
            return str(error)
    needed = max(metas).num_pages * size
    return None if data.stat().st_size >= needed else f"{needed // size} pages do not fit into its length"


def problem_of(data: Path) -> str | None:
    """What is wrong with any of its pages, the free ones included."""
    try:
        problems: list[str] = lmdb.verify.verify(str(data))
    except lmdb.verify.VerifyError as error:
        return str(error)
    return problems[0] if problems else None
