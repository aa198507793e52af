"""Token ids of a text, and the stretch of the text that each token came from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstore.align import align
from memstore.errors import DocumentError

Array = NDArray[np.int32]


def tokenize(tokenizer: Any, text: str) -> tuple[Array, Array]:
    """Token ids [n] int32, equal to ``tokenizer(text)["input_ids"]``, and character spans [n, 2] int32.

    Token i came from ``text[start:end]``. Starts never decrease, nor do ends, and 0 <= start <= end <= len(text).
    - Whitespace at either end of a span is left out, unless the token is nothing but whitespace.
    - Tokens that are parts of one character, such as single bytes, each have the whole character, so spans can overlap.
    - Tokens the tokenizer adds have an empty span: (0, 0) before the text, (len(text), len(text)) after it.
    - A character that follows a token without a space and is in no token (the accent that NFC merged with its letter, a
      control character that was dropped) goes with that token. So only whitespace, and stretches behind whitespace
      that the tokenizer dropped, are in no span.

    Spans are the tokenizer's own where it is a fast one. Otherwise they are found by aligning its tokens with the text:
    exact while they show the text up to case, Unicode form and spaces, approximate around anything else; dropped text
    then always goes with the token before.

    Raises DocumentError if the text is empty, is not valid Unicode, or yields no tokens.
    """
    if not isinstance(text, str):
        raise DocumentError(f"A document's text is a str, not a {type(text).__name__}. Bytes are to be decoded first.")
    if not text:
        raise DocumentError("The document is empty: its text has no characters.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"The document is not valid Unicode: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}. Read the file with its right encoding, or replace the character."
        ) from error
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        ids = encoded["input_ids"]
        spans = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        added = np.array(encoded["special_tokens_mask"], bool) & (spans[:, 0] == spans[:, 1])
        first, stop = (int(np.argmin(added)), len(ids) - int(np.argmin(added[::-1]))) if not added.all() else (0, 0)
    else:
        ids = tokenizer(text, verbose=False)["input_ids"]
        tokens, first = _surfaces(tokenizer, text, ids)
        stop = first + len(tokens)
        spans = np.zeros((len(ids), 2), np.int64)
        spans[first:stop] = np.reshape(align(text, tokens, getattr(tokenizer, "unk_token", None)), (-1, 2))
    if first == stop:
        raise DocumentError(f"The document yields no tokens: the tokenizer dropped all {len(text)} characters.")
    spans[first:stop] = _settle(text, spans[first:stop])
    spans[:first], spans[stop:] = 0, len(text)
    if np.any(np.diff(spans, axis=0) < 0) or np.any(np.diff(spans) < 0) or spans[0, 0] < 0 or spans[-1, 1] > len(text):
        raise DocumentError("The tokenizer's offsets do not fit the text. Encode its token ids without the text.")
    return np.array(ids, np.int32), spans.astype(np.int32)


def _settle(text: str, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Spans [n, 2] without outer whitespace, with characters left over given to the token before, and monotone."""
    place = np.arange(len(text) + 1)
    space = np.isin(np.frombuffer(text.encode("utf-32-le"), np.uint32), [ord(c) for c in set(text) if c.isspace()])
    following = np.minimum.accumulate(np.append(np.where(space, len(text), place[:-1]), len(text))[::-1])[::-1]
    preceding = np.maximum.accumulate(np.append(0, np.where(space, 0, place[1:])))
    starts, ends = spans.T
    blank = following[starts] >= ends
    starts, ends = np.where(blank, starts, following[starts]), np.where(blank, ends, preceding[ends])
    depth = np.cumsum(np.bincount(starts, minlength=len(text) + 1) - np.bincount(ends, minlength=len(text) + 1))
    taken = space | (depth[:-1] > 0)
    grown = np.minimum.accumulate(np.append(np.where(taken, place[:-1], len(text)), len(text))[::-1])[::-1]
    empty = starts == ends
    ends = np.maximum.accumulate(np.where(blank, ends, grown[ends]))
    starts = np.where(empty, ends, np.maximum.accumulate(np.where(empty, 0, starts)))
    return np.stack([np.minimum.accumulate(starts[::-1])[::-1], ends], axis=1)


def _surfaces(tokenizer: Any, text: str, ids: list[int]) -> tuple[list[str], int]:
    """The tokens that stand for text, as strings, and the place of the first among ``ids``."""
    tokens: list[str] = tokenizer.tokenize(text)  # unlike tokens made from ids, these show what an unknown piece was
    inner = tokenizer.convert_tokens_to_ids(tokens)
    for first in range(min(len(ids) - len(inner), 8) + 1):
        if ids[first : first + len(inner)] == inner:
            return tokens, first
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    place = [i for i, token in enumerate(ids) if token not in special] or [0, -1]
    return tokenizer.convert_ids_to_tokens(ids[place[0] : place[-1] + 1]), place[0]
