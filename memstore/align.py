"""Where the tokens of a tokenizer without offsets stand in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import normalize

import numpy as np

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # byte fallback of sentencepiece
_AFFIX = re.compile(r"^(?:##|Ġ+)|(?:@@|</w>)$")  # how subword vocabularies mark that a word begins, goes on or ends
_ANCHOR = 16  # characters in a row that are taken to name one place


def align(text: str, tokens: Sequence[str], unknown: str | None) -> list[tuple[int, int]]:
    """Character spans (start, end) of tokens that show ``text`` in order; monotone but for empty spans, all (0, 0).

    Text and tokens are folded (case, Unicode form, whitespace) and matched one token after the other. A token that
    shows no text (the ``unknown`` one, a byte) or does not match shares the text between its matched neighbours with
    others beside it: by bytes or words where their number agrees, else evenly. After such a token the next ones are
    searched together, since a short one could match inside the text that the unknown one stands for. Text that is left
    over goes with the token before it, so every character but whitespace is in a span.
    """
    bytewise = _is_utf8("".join(tokens))
    units = {c: c if bytewise else _fold(c) for c in set(text)}
    shown = set("".join(units.values()))
    forms: dict[str, tuple[str, str]] = {}  # token: (as it is, without its mark); empty where it cannot match
    for token in set(tokens):
        whole, bare = (token, token) if bytewise else (_fold(token), _fold(_AFFIX.sub("", token)) or _fold(token))
        opaque = token == unknown or _BYTE.fullmatch(token) or (bytewise and not token.isascii())
        forms[token] = ("", "") if opaque or not shown.issuperset(bare) else (whole, bare)
    blank = {token for token in forms if not token.replace("▁", "").strip()}
    # Characters that no token shows would only be in the way; unknown tokens find them in the gaps.
    alphabet = set("".join(whole for whole, _ in forms.values()))
    units = {c: "".join(filter(alphabet.__contains__, unit)) for c, unit in units.items()}
    parts = [units[c] for c in text]
    page = "".join(parts)
    origin = np.repeat(np.arange(len(text)), list(map(len, parts))).tolist()
    wholes, bares = [forms[token][0] for token in tokens], [forms[token][1] for token in tokens]
    limits = len(page) - np.cumsum([len(bare) for bare in bares][::-1])[::-1]  # beyond these, later tokens do not fit
    budget = 64 * len(page)  # keeps far searches linear in sum

    def find(i: int, low: int) -> int:
        nonlocal budget
        bare = anchor = bares[i]
        for j in range(i + 1, len(tokens)):
            if len(anchor) >= _ANCHOR or not (bares[j] or tokens[j] in blank):
                break
            anchor += bares[j]
        stop = low + min(max(int(limits[i]) - low, 64), max(4096, budget) if len(anchor) >= _ANCHOR else 256)
        found = page.find(anchor, low, stop + len(anchor))
        budget -= (stop if found < 0 else found) - low
        if found < 0 and 3 < len(bare) < len(anchor):
            return page.find(bare, low, min(stop, low + 256) + len(bare))
        return found

    spans, at, left, first = [(0, 0)] * len(tokens), 0, 0, 0
    lost = hungry = False  # since the last match: a token without a place; an unknown one, which must get some text
    for i, bare in enumerate(bares):
        if not bare:
            lost, hungry = lost or tokens[i] not in blank, hungry or tokens[i] == unknown
            continue
        size, found = len(bare), at
        if not lost and page.startswith(wholes[i], at):
            size = len(wholes[i])
        elif lost or not page.startswith(bare, at):
            ahead = at
            while hungry and ahead < len(page) and origin[ahead] >= left and not text[left : origin[ahead]].strip():
                ahead += 1
            found = find(i, ahead) if at < ahead < len(page) else -1
            found = find(i, at) if found < 0 else found
        lost = found < 0
        if not lost:
            at, right, hungry = found + size, origin[found], False
            spans[i] = right, origin[at - 1] + 1
            if first < i:
                spans[first:i] = _share(text, left, right, [token in blank for token in tokens[first:i]])
            elif left < right and text[left:right].strip():  # the tokenizer dropped it
                spans[max(i - 1, 0)] = (spans[i - 1][0], right) if i else (0, spans[i][1])
            left, first = spans[i][1], i + 1
    if first < len(tokens):
        spans[first:] = _share(text, left, len(text), [token in blank for token in tokens[first:]])
    elif tokens:
        spans[-1] = spans[-1][0], len(text)
    return spans


def _share(text: str, left: int, right: int, blank: list[bool]) -> list[tuple[int, int]]:
    """Spans of tokens that stand in text[left:right]; the blank ones only for whitespace, or if all are."""
    if right < left:  # inside one character that folds to several
        return [(right, left)] * len(blank)
    gap, count = text[left:right], len(blank)
    bytes_of = np.repeat(np.arange(left, right), [len(c.encode()) for c in gap]).tolist() if count else []
    if len(bytes_of) == count:
        return [(place, place + 1) for place in bytes_of]
    spans = [(left + word.start(), left + word.end()) for word in re.finditer(r"\S+", gap)]
    takers = [not b for b in blank] if spans and not all(blank) else blank
    count = sum(takers) if gap else 0
    bytes_of = [place for place in bytes_of if not text[place].isspace()]
    if len(bytes_of) == count:
        spans = [(place, place + 1) for place in bytes_of]
    elif len(spans) != count:
        start, stop = (spans[0][0], spans[-1][1]) if spans else (left, right)
        spans = [
            (start + i * (stop - start) // count, stop - (count - 1 - i) * (stop - start) // count)
            for i in range(count)
        ]
    shares = iter(spans)
    return [next(shares) if takes and count else (0, 0) for takes in takers]


def _fold(text: str) -> str:
    """What tokenizers' normalisers leave alone: no case, compatibility forms, composed characters or whitespace.

    Character by character: the folded text is the text's folded characters.
    """
    folded = (normalize("NFKD", normalize("NFKD", c).casefold()) for c in text)
    return "".join(c for part in folded for c in part if c != "▁" and not c.isspace())


def _is_utf8(tokens: str) -> bool:
    """Whether tokens are the bytes of a text's UTF-8 form, shown as Latin-1 characters (ByT5)."""
    try:
        return not tokens.isascii() and bool(tokens.encode("latin-1").decode("utf-8"))
    except UnicodeError:
        return False
