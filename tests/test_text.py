"""Token ids and character spans, for fast tokenizers of every kind and for Python ones without offsets."""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, MarianTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from memstore.errors import DocumentError
from memstore.text import tokenize

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "Der süße Fuchs läuft über die Straße, Café!",
    "Слово было у Бога 123 + 456 = 579",
    "hello world, a quick test of the words",
] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]
NAMES = ["bytes", "bytes-trim", "unigram", "byte-fallback", "wordpiece", "byt5", "spm", "spm-bytes", "marian", "words"]
LOSSY = {"wordpiece", "words", "spm", "spm-bytes", "marian"}  # these drop some characters, whitespace first of all


class Words(PreTrainedTokenizer):
    """A Python WordPiece tokenizer: lower case, no accents, [UNK] for a whole word."""

    vocab: ClassVar = {
        t: i for i, t in enumerate(["[UNK]", "the", "quick", "fox", "##es", "cafe", "a", "##a", ".", ","])
    }
    vocab_size = len(vocab)

    def get_vocab(self) -> dict[str, int]:
        return {**self.vocab, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizers.BertNormalizer().normalize_str(text))
        return [piece for word, _ in words for piece in self._pieces(word)]

    def _pieces(self, word: str) -> list[str]:
        for cut in range(len(word), 0, -1):
            pieces = [word[:cut]] + (["##" + word[cut:]] if word[cut:] else [])
            if all(piece in self.vocab for piece in pieces):
                return pieces
        return ["[UNK]"]

    def _convert_token_to_id(self, token: str) -> int:
        return self.vocab.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.vocab)[index]


def fast(kind: str) -> PreTrainedTokenizerFast:
    train: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False, "vocab_size": 400}
    ends = [("<s>", 1), ("</s>", 2)]
    trainer: Any
    if kind.startswith("bytes"):
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **train)
    elif kind == "unigram":
        model = Tokenizer(models.Unigram())
        model.normalizer = normalizers.NFKC()
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **train)
    elif kind == "byte-fallback":
        model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        train["special_tokens"] = SPECIAL + [f"<0x{i:02X}>" for i in range(256)]
        trainer = trainers.BpeTrainer(**train)
    else:
        model = Tokenizer(models.WordPiece(unk_token="<unk>"))
        model.normalizer = normalizers.BertNormalizer()
        model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**train)
    model.train_from_iterator(LINES, trainer)
    if kind == "bytes-trim":
        model.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True)
    else:
        model.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def spm(folder: Path, name: str, **options: Any) -> str:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(folder / name), hard_vocab_limit=False, minloglevel=2,
        pad_id=3, **options,
    )  # fmt: skip
    return str(folder / f"{name}.model")


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made: dict[str, Any] = {"byt5": ByT5Tokenizer(), "words": Words(unk_token="[UNK]")}
    made |= {name: fast(name) for name in NAMES[:5]}
    plain, with_bytes = spm(folder, "plain", vocab_size=150), spm(folder, "b", vocab_size=450, byte_fallback=True)
    made["spm"] = SentencePieceBackend(vocab_file=plain, unk_token="<unk>", eos_token="</s>")
    made["spm-bytes"] = SentencePieceBackend(vocab_file=with_bytes, unk_token="<unk>", eos_token="</s>")
    pieces = sentencepiece.SentencePieceProcessor(model_file=plain)
    vocab = folder / "vocab.json"
    vocab.write_text(json.dumps({pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses
        made["marian"] = MarianTokenizer(source_spm=plain, target_spm=plain, vocab=str(vocab))
    return lambda name: made[name]


def spans_of(tokenizer: Any, text: str) -> list[tuple[str, str]]:
    ids, spans = tokenize(tokenizer, text)
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    return [(token, text[start:end]) for token, (start, end) in zip(tokens, spans.tolist(), strict=True)]


CHUNKS = (
    "The quick |fox|süße|é|e\u0301|ﬁ|½|\r\n|\0|👨\u200d👩\u200d👧|中|漢字| |\u3000|▁|##|Ġ|\u200b|İ|ß|각|\u1100\u1161|"
    "<unk>|</s>|क्षि|a\u0327\u0301|…|“x”|ﷺ|!"
)
TEXTS = st.lists(st.sampled_from(CHUNKS.split("|")) | st.text(max_size=4), min_size=1, max_size=25).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@pytest.mark.filterwarnings("ignore:This sequence already has")
def test_any_text(get: Callable[[str], Any], name: str, text: str) -> None:
    tokenizer = get(name)
    plain = tokenizer(text)["input_ids"]
    try:
        ids, spans = tokenize(tokenizer, text)
    except DocumentError:
        assert not text.strip() or name in LOSSY
        return
    assert ids.dtype == spans.dtype == np.int32
    assert spans.shape == (len(ids), 2)
    assert ids.tolist() == plain
    assert (np.diff(spans, axis=0) >= 0).all()
    assert (spans[:, 0] <= spans[:, 1]).all()
    assert 0 <= spans[0, 0] <= spans[-1, 1] <= len(text)
    covered = {place for start, end in spans.tolist() for place in range(start, end)}
    left_out = [place for place, c in enumerate(text) if place not in covered and not c.isspace()]
    if left_out:  # then the tokenizer dropped these: without them it gives the same tokens
        rest = "".join(c for place, c in enumerate(text) if place not in left_out)
        assert tokenizer(rest)["input_ids"] == plain
    if name == "bytes" or not tokenizer.is_fast:
        assert not left_out
    for start, end in spans.tolist():
        assert text[start:end].strip() in ("", text[start:end])


@pytest.mark.parametrize("name", NAMES)
def test_words_are_found(get: Callable[[str], Any], name: str) -> None:
    """The tokens that touch a word are neighbours and together have exactly the word."""
    text = "The quick  fox, \r\nthe CAFÉ . " * 3
    _, spans = tokenize(get(name), text)
    for word in re.finditer(r"\w+", text):
        inside = [span for span in spans.tolist() if span[0] < word.end() and span[1] > word.start()]
        assert (inside[0][0], inside[-1][1]) == word.span()


@pytest.mark.parametrize("name", ["bytes", "bytes-trim", "byte-fallback", "byt5", "spm-bytes"])
def test_parts_of_a_character_have_the_whole(get: Callable[[str], Any], name: str) -> None:
    spans = [span for _, span in spans_of(get(name), "fox 中 😀x")]
    assert (spans.count("中"), spans.count("😀")) == (3, 4)


@pytest.mark.parametrize("name", ["unigram", "spm", "marian"])
def test_an_unknown_token_has_its_stretch(get: Callable[[str], Any], name: str) -> None:
    spans = spans_of(get(name), "the 漢字 fox 中, the")
    assert [span for token, span in spans if token == "<unk>"] == ["漢字", "中"]


def test_an_unknown_word_that_holds_known_ones(get: Callable[[str], Any]) -> None:
    found = spans_of(get("words"), "xaya a the zfox, a Café foxes thequick .")
    assert [span for _, span in found] == ["xaya", "a", "the", "zfox", ",", "a", "Café", "fox", "es", "thequick", "."]


@pytest.mark.parametrize("name", ["unigram", "spm"])
def test_what_normalisers_merge_or_split(get: Callable[[str], Any], name: str) -> None:
    spans = [span for _, span in spans_of(get(name), "o e\u0301ﬁ x")]
    assert "e\u0301" in spans
    assert spans.count("ﬁ") == 2


@pytest.mark.parametrize("name", [*NAMES[:5], "byt5", "marian"])
def test_added_tokens_are_empty(get: Callable[[str], Any], name: str) -> None:
    text = " the fox \n"
    spans = tokenize(get(name), text)[1].tolist()
    assert spans[-1] == [len(text), len(text)]
    assert name in ("byt5", "marian") or spans[0] == [0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_texts_without_tokens(get: Callable[[str], Any], name: str) -> None:
    with pytest.raises(DocumentError, match="empty"):
        tokenize(get(name), "")
    with pytest.raises(DocumentError, match=r"lone surrogate U\+D83D"):
        tokenize(get(name), "fox \ud83d fox")
    if name in LOSSY:
        with pytest.raises(DocumentError, match="dropped all 3 characters"):
            tokenize(get(name), " \n ")


def test_no_truncation_and_no_warning(get: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bytes", "marian"):
        tokenizer = get(name)
        tokenizer.model_max_length = 8
        assert len(tokenize(tokenizer, "the fox " * 50)[0]) > 50
    assert not caplog.records


@pytest.mark.parametrize("name", NAMES)
def test_time_is_linear(get: Callable[[str], Any], name: str) -> None:
    """Sixteen times the text takes about sixteen times as long, where quadratic behaviour would take 256 times.

    Unless the tokenizer is at fault: one of these needs quadratic time for a word without end.
    """
    words = ["the", "quick", "fox", "Straße", "漢字", "😀", "zfox", "“café”"]
    draw = random.Random(0)
    for piece in (" ".join(draw.choices(words, k=2_000)) + " ", "fox" * 2_000, "字" * 2_000, " " * 4_000 + "x"):
        seconds = []
        for times, work in ((1, tokenize), (16, tokenize), (16, lambda tokenizer, text: tokenizer(text))):
            began = time.process_time()
            work(get(name), piece * times)
            seconds.append(time.process_time() - began)
        assert seconds[1] < max(80 * max(seconds[0], 0.001), 5 * seconds[2])


def test_a_tokenizer_whose_tokens_do_not_explain_its_ids(
    get: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, text = get("marian"), "the quick 漢字 fox"
    ids, spans = (a.tolist() for a in tokenize(tokenizer, text))
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: {"input_ids": ids})
    monkeypatch.setattr(tokenizer, "tokenize", lambda text: ["something", "else"])
    again = tokenize(tokenizer, text)[1].tolist()
    assert all(a == b for a, b in zip(spans, again, strict=True) if text[a[0] : a[1]].strip())
