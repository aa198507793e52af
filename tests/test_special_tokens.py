"""Where special and language tokens stand in a memory: once, at the ends of the document."""

from __future__ import annotations

import json
import string
import warnings
from typing import Any

import pytest
import sentencepiece
import transformers as tf

from tests.matrix import FAMILIES
from tests.models import build

TEXT = "the queen went to the city of the king and the king saw the queen"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
LETTERS = [*string.ascii_letters]
PLACES = sorted({(name, around) for family in FAMILIES.values() for name, around in family.special.items()})


def numbered(pieces):
    return {piece: i for i, piece in enumerate(pieces)}


def scored(pieces):
    return [(piece, 0.0) for piece in pieces]


def make(name, folder):
    """A tokenizer of this class, with a vocabulary made here."""
    spm = folder / "spm.model"
    lines = iter([TEXT, "a city by the sea", "who saw the king of the land"])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(spm.with_suffix("")),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    pieces = [(trained.id_to_piece(i), trained.get_score(i)) for i in range(3, trained.get_piece_size())]
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    small = [letter + end for end in ("", "@@", "</w>") for letter in string.ascii_lowercase]
    ours = (
        ["__start__", "__end__", "__unk__", "__null__", *small] if "Small" in name else SPECIAL + [p for p, _ in pieces]
    )
    vocab.write_text(json.dumps(numbered(ours)))
    merges.write_text("#version: 0.2\nt h\n")
    pegasus = ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk>"]
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    bytes_of_bart: dict[str, Any] = {"vocab": numbered([*SPECIAL, "<mask>", "Ġ", *LETTERS]), "merges": []}
    arguments: dict[str, dict[str, Any]] = {
        "BartTokenizer": bytes_of_bart,
        "BertTokenizer": {
            "vocab": numbered([*bert, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)])
        },
        "BlenderbotSmallTokenizer": {"vocab_file": str(vocab), "merges_file": str(merges)},
        "M2M100Tokenizer": {"vocab_file": str(vocab), "spm_file": str(spm), "src_lang": "en"},
        "LEDTokenizer": bytes_of_bart,
        "MBartTokenizer": {"vocab": [*scored(SPECIAL), *pieces], "src_lang": "en_XX"},
        "MBart50Tokenizer": {"vocab": [*scored(SPECIAL), *pieces], "src_lang": "en_XX"},
        "MarianTokenizer": {"source_spm": str(spm), "target_spm": str(spm), "vocab": str(vocab)},
        "NllbTokenizer": {"vocab": numbered([*SPECIAL, "▁", *LETTERS]), "merges": [], "src_lang": "eng_Latn"},
        "PLBartTokenizer": {"vocab_file": str(spm), "src_lang": "python"},
        "PegasusTokenizer": {"vocab": [*scored(pegasus), *pieces], "offset": 4},
        "RobertaTokenizer": bytes_of_bart,
        "T5Tokenizer": {"vocab": [*scored(["<pad>", "</s>", "<unk>"]), *pieces], "extra_ids": 2},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one recommends sacremoses
        return getattr(tf, name)(**arguments[name])


@pytest.mark.parametrize(("name", "around"), PLACES, ids=[name for name, _ in PLACES])
def test_special_tokens_stand_once_around_the_document(library, tmp_path, name, around):
    """However many windows it takes."""
    family = next(family for family, each in FAMILIES.items() if name in each.special)
    tokenizer = make(name, tmp_path)
    memory = library.encode(build(family), tokenizer, TEXT, name="doc", window=16)
    assert memory.num_tokens > 2 * 16
    before, after = (part.split() for part in around.split("…"))
    tokens = tokenizer.convert_ids_to_tokens(memory.token_ids.tolist())
    assert tokens[: len(before)] == before
    assert tokens[len(tokens) - len(after) :] == after
    inner = tokens[len(before) : len(tokens) - len(after)]
    assert not {*inner} & {*tokenizer.all_special_tokens, *before, *after} - {tokenizer.unk_token}
    assert [*memory.offsets[: len(before)].flatten()] == [0] * 2 * len(before)
    assert [*memory.offsets[len(tokens) - len(after) :].flatten()] == [len(TEXT)] * 2 * len(after)
