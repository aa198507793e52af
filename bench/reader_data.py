"""The reading task: a passage of real prose with a five-digit key in it, and which books are for training.

The tokenizer is a BPE trained on the training books, in which every digit is a token: the answer is five tokens long.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from memstore import assets

HELD_OUT = (  # books that training never sees, some 300,000 tokens
    "Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy", "Joshua", "Judges", "Ruth", "1 Samuel"
)  # fmt: skip
VOCABULARY = 4096
SPECIAL = ["<s>", "<pad>", "</s>"]  # ids 0, 1, 2, as BART has them
DIGITS = 5
NEEDLE = " The pass key is {}."
DECOYS = (  # other numbers, which no question asks for; {} stands where the key stands in a needle, or elsewhere
    " The number of the men is {}.",
    " The price of the field is {}.",
    " There went out {} men.",
    " The measure is {} cubits.",
    " The pass of the mountain is {} high.",
    " The key of the house is {}.",
)

TASK = [HELD_OUT, VOCABULARY, NEEDLE, DECOYS]  # what a reader was trained on, by which it is known

Ids = NDArray[np.int64]


class Document(NamedTuple):
    """Token ids [n], the key's digits as ids [5], and the token at which the needle begins."""

    ids: Ids
    answer: Ids
    at: int


class Passages(NamedTuple):
    """Token ids [b, n], the key's digits as ids [b, 5], and where the needle stands in each passage: bool [b, n]."""

    ids: Ids
    answers: Ids
    needle: NDArray[np.bool_]


def books(held_out: bool) -> list[str]:
    """The names of the held-out books, or of those to train on, in order."""
    return [book for book in assets.bible() if (book in HELD_OUT) == held_out]


def prose(held_out: bool) -> str:
    return "\n\n".join(assets.book_text(book)[0] for book in books(held_out))


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the training books."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((assets.book_text(book)[0] for book in books(held_out=False)), trainer)
    start, pad, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=start, pad_token=pad, eos_token=end, clean_up_tokenization_spaces=False
    )


class Task:
    """Makes passages of one set of books. The same seed gives the same passages."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, held_out: bool, seed: int) -> None:
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.prose: Ids = np.asarray(tokenizer(prose(held_out), verbose=False)["input_ids"], dtype=np.int64)
        self.digit = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
        self._needle = self._template(NEEDLE)
        self._decoys = [self._template(decoy) for decoy in DECOYS]

    def _template(self, text: str) -> tuple[Ids, int]:
        """Token ids with zeros for digits, and where the digits begin."""
        ids = self.tokenizer(text.format("0" * DIGITS))["input_ids"]
        return np.asarray(ids, dtype=np.int64), ids.index(self.digit[0])

    def _number(self) -> list[int]:
        return [self.random.randrange(10) for _ in range(DIGITS)]

    def needle(self) -> tuple[Ids, Ids]:
        """The tokens of a new needle, and the digits of its key."""
        return self._filled(self._needle)

    def _filled(self, template: tuple[Ids, int]) -> tuple[Ids, Ids]:
        ids, at = template[0].copy(), template[1]
        answer = np.asarray([self.digit[digit] for digit in self._number()])
        ids[at : at + DIGITS] = answer
        return ids, answer

    def excerpt(self, length: int) -> Ids:
        """``length`` successive tokens of the prose, from a random one on."""
        start = self.random.randrange(len(self.prose) - length + 1)
        return self.prose[start : start + length].copy()

    def hidden(self, ids: Ids) -> Document:
        """A document with a new needle in place of some tokens, anywhere."""
        needle, answer = self.needle()
        ids, at = ids.copy(), self.random.randrange(len(ids) - len(needle) + 1)
        place(ids, needle, at)
        return Document(ids, answer, at)

    def passages(self, count: int, length: int, decoys: int = 0) -> Passages:
        """``count`` passages of ``length`` tokens: prose, in which a needle and up to ``decoys`` other numbers stand
        in place of as many tokens, anywhere, the needle whole."""
        all_ids = np.empty((count, length), dtype=np.int64)
        answers = np.empty((count, DIGITS), dtype=np.int64)
        masks = np.zeros((count, length), dtype=bool)
        for i in range(count):
            all_ids[i], answers[i], at = self.hidden(self.excerpt(length))
            masks[i, at : at + len(self._needle[0])] = True
            taken = masks[i].copy()
            for _ in range(self.random.randint(0, decoys)):
                decoy, _ = self._filled(self.random.choice(self._decoys))
                at = self.random.randrange(length) - len(decoy) // 2  # one may be cut by an end of the passage
                cut = decoy[max(0, -at) : length - at]
                if not taken[max(0, at) : max(0, at) + len(cut)].any():
                    taken |= place(all_ids[i], cut, max(0, at))
        return Passages(all_ids, answers, masks)


def place(ids: Ids, tokens: Ids, at: int) -> NDArray[np.bool_]:
    """Write ``tokens`` into ``ids`` from ``at`` on; returns where they stand."""
    ids[at : at + len(tokens)] = tokens
    mask = np.zeros(len(ids), dtype=bool)
    mask[at : at + len(tokens)] = True
    return mask
