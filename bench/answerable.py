"""Questions with and without an answer in the memories: can a caller tell which?

    python bench/answerable.py              # coverage of all questions, which is a matter of words: seconds
    python bench/answerable.py --attention  # and what attention says, for the questions of bench/questions.json

Every question of bench/questions.json and bench/answerable.json is asked of all books of its file, and again of all but
the one that answers it. A score is judged by how it parts the two: the area under its ROC, and how many answerable
questions it lets pass where it lets one in ten of the others. By those of bench/answerable.json and the development
questions of bench/questions.json coverage and its threshold were chosen; the held-out ones were asked once. *Near* are
the questions of bench/answerable.json that no book answers, about people and things that are spoken of.

With ``--attention``, memories of the books are read with ``selector="scouting"`` and four tokens are written. The
scores are the share of the best block while it is scouted for; the attention that the memories, and the heaviest
passage, held; how little it is spread over passages; and the mean log probability of the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import torch
from questions import Question, Reader, books, questions, read_books
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstore
from memstore import assets
from memstore.reading.coverage import coverage

FILE = Path(__file__).parent / "answerable.json"
RESULT = Path(__file__).parent / "results" / "answerable.json"
NEW_TOKENS = 4
FALSE_POSITIVES = 0.1

Json = dict[str, Any]


def own_questions() -> list[Question]:
    """Those for development alone."""
    rows = json.loads(FILE.read_text())["questions"]
    return [Question("development", row["verse"], row["question"], tuple(row["answers"])) for row in rows]


def near() -> list[str]:
    return list(json.loads(FILE.read_text())["unanswerable"])


def auc(answered: Sequence[float], unanswered: Sequence[float]) -> float:
    """The probability that an answerable question scores higher than another one, a tie counting half."""
    pairs = [(a > u) + 0.5 * (a == u) for a in answered for u in unanswered]
    return sum(pairs) / len(pairs)


def roc(answered: Sequence[float], unanswered: Sequence[float]) -> list[tuple[float, float, float]]:
    """Threshold, and the shares of the others and of the answerable questions that score at least that, from (0, 0) on:
    false and true positives."""
    points = [(math.inf, 0.0, 0.0)]
    for threshold in sorted({*answered, *unanswered}, reverse=True):
        shares = (sum(score >= threshold for score in scores) / len(scores) for scores in (unanswered, answered))
        points.append((threshold, *shares))
    return points


def best_point(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """That with the most true positives among those with at most one false positive in ten."""
    return max((point for point in points if point[1] <= FALSE_POSITIVES + 1e-9), key=lambda point: point[2])


@dataclass(eq=False)
class Book:
    """The tokens of a book: all that coverage looks at of a memory."""

    name: str
    token_ids: npt.NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def asked_of(
    names: Sequence[str], asked: Sequence[Question], others: Sequence[str]
) -> Iterator[tuple[list[str], Json]]:
    """Every question with the books it is asked of: all, and all but the one that answers it; the others of all."""
    for each in asked:
        row = {"set": each.set, "question": each.text}
        yield list(names), row | {"answerable": True}
        yield [name for name in names if name != each.book], row | {"answerable": False}
    for text in others:
        yield list(names), {"set": "near", "question": text, "answerable": False}


def covered(reader: Reader, cases: Iterator[tuple[list[str], Json]]) -> Iterator[Json]:
    """The questions with their coverage."""
    known: dict[str, Any] = {name: Book(name, np.asarray(ids, np.int32)) for name, ids in reader.books.items()}
    for names, row in cases:
        yield row | {"scores": {"coverage": coverage([known[name] for name in names], reader.ids(row["question"]))}}


def attention_scores(attached: Any, reader: Reader, question: str) -> Json:
    inputs = reader.prompt([], question)
    written = attached.generate(
        input_ids=torch.tensor([inputs]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = written.sequences[0, len(inputs) :].tolist()
    logs = [float(step[0].float().log_softmax(-1)[token]) for step, token in zip(written.logits, tokens, strict=True)]
    provenance = attached.provenance()
    shares = [passage.share for passage in provenance.passages()]
    mass = sum(shares)
    return {
        "scouting": max(chosen.score for chosen in attached.selection()[0]),
        "memory": mass,
        "passage": shares[0],
        "focus": sum(share / mass * math.log(share / mass) for share in shares),
        "confidence": sum(logs) / len(logs),
    }


def add_attention(rows: Sequence[Json], reader: Reader, name: str, stored: str) -> None:
    """What attention says of the questions of bench/questions.json. Those that share their books are asked together."""
    with memstore.open(assets.cache_dir() / "bench" / name) as store:
        memories = {memory.name: memory for memory in read_books(reader, store, stored)}
        groups: dict[str | None, list[Json]] = {}
        for question in questions():
            for row in rows:
                if row["question"] == question.text:
                    groups.setdefault(None if row["answerable"] else question.book, []).append(row)
        for left_out, mine in groups.items():
            read = [memory for book, memory in memories.items() if book != left_out]
            with memstore.attach(reader.model, *read, selector="scouting", explain=True) as attached:
                for row in mine:
                    row["scores"] |= attention_scores(attached, reader, row["question"])
                    print(row, flush=True)


def summary(rows: Sequence[Json]) -> Json:
    """Of every score and set: AUC, the point with at most one false positive in ten, and the curve of coverage."""
    found: Json = {}
    for name in dict.fromkeys(name for row in rows for name in row["scores"]):
        for kind in ("development", "near", "held-out"):
            mine = [row for row in rows if name in row["scores"]]
            positive = "held-out" if kind == "held-out" else "development"
            answered = [row["scores"][name] for row in mine if row["set"] == positive and row["answerable"]]
            unanswered = [row["scores"][name] for row in mine if row["set"] == kind and not row["answerable"]]
            if not answered or not unanswered:
                continue
            curve = roc(answered, unanswered)
            threshold, false, true = best_point(curve)
            found.setdefault(name, {})[kind] = {
                "answered": len(answered),
                "unanswered": len(unanswered),
                "auc": round(auc(answered, unanswered), 3),
                "threshold": None if threshold == math.inf else round(threshold, 4),
                "false_positives": round(false, 3),
                "true_positives": round(true, 3),
                "curve": [[round(false, 4), round(true, 4)] for _, false, true in curve],
            }
    fixed = found["coverage"]["development"]["threshold"]
    for kind, row in found["coverage"].items():
        positive = "held-out" if kind == "held-out" else "development"
        passing = {
            answerable: [
                each["scores"]["coverage"] >= fixed
                for each in rows
                if each["answerable"] == answerable and each["set"] == (positive if answerable else kind)
            ]
            for answerable in (True, False)
        }
        row["at_development_threshold"] = [sum(passing[False]), sum(passing[True])]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", help="what the model computes in")
    parser.add_argument("--stored", default="bfloat16", help="the dtype of the memories")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    path = assets.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval() if args.attention else None
    )
    reader = Reader(model, tokenizer, books())
    rows = list(covered(reader, asked_of(books(), questions(), [])))
    if args.attention:
        add_attention(rows, reader, f"questions-{args.dtype}-{args.stored}", args.stored)
    elif RESULT.exists():
        before = {(row["question"], row["answerable"]): row["scores"] for row in json.loads(RESULT.read_text())["rows"]}
        for row in rows:
            row["scores"] = before.get((row["question"], row["answerable"]), {}) | row["scores"]
    own = json.loads(FILE.read_text())["books"]
    rows += covered(Reader(None, tokenizer, own), asked_of(own, own_questions(), near()))
    result = {
        "model": "SmolLM2-135M-Instruct",
        "new_tokens": NEW_TOKENS,
        "summary": summary(rows),
        "rows": [row | {"scores": {name: round(x, 5) for name, x in row["scores"].items()}} for row in rows],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, kinds in result["summary"].items():
        for kind, row in kinds.items():
            print(name, kind, {k: v for k, v in row.items() if k != "curve"})


if __name__ == "__main__":
    main()
