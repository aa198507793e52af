"""Damage to a file, made from a seed alone."""

from __future__ import annotations

import random

PAGE = 4096
KINDS = ("flip", "header", "truncate", "extend", "double", "repeat", "copy page", "zero", "zero page", "noise")


def mutated(data: bytes, kind: str, chance: random.Random) -> bytes:
    """The file after one fault of this kind. It may be equal, where zeros are zeroed."""
    size = len(data)
    if not size:
        return chance.randbytes(chance.randrange(1, 2 * PAGE))
    start = chance.randrange(size)
    some = min(size - start, chance.choice((1, 8, 64, 512, PAGE, size)))
    changed = bytearray(data)
    pages = range(0, size, PAGE)
    if kind == "flip":
        changed[start] ^= 1 << chance.randrange(8)
    elif kind == "header":  # of a page, and of what most files begin with
        at = min(chance.choice(pages) + chance.randrange(160), size - 1)
        changed[at] = chance.randrange(256)
    elif kind == "truncate":
        del changed[chance.choice((start, start // PAGE * PAGE, 0)) :]
    elif kind == "extend":
        changed += chance.randbytes(chance.randrange(1, 2 * PAGE))
    elif kind == "double":
        changed += data
    elif kind == "repeat":  # what comes after it moves
        changed[start:start] = data[start : start + some]
    elif kind == "copy page":
        a, b = chance.choice(pages), chance.choice(pages)
        changed[a : a + PAGE] = data[b : b + PAGE]
    elif kind == "zero":
        changed[start : start + some] = bytes(some)
    elif kind == "zero page":
        at = chance.choice(pages)
        changed[at : at + PAGE] = bytes(len(changed[at : at + PAGE]))
    else:
        changed[start : start + some] = chance.randbytes(some)
    return bytes(changed)
