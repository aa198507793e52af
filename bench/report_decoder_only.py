"""The tables of what decoder-only models read, for bench/README.md; `report.py` prints them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def load_result(name: str) -> Row:
    """What the bench of this name found."""
    result: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def load_passkeys() -> list[Row]:
    """The results of `bench/passkey.py` but for those of development, by model and length."""
    every = (json.loads(file.read_text()) for file in RESULTS.glob("passkey-*-seed*.json"))
    found = [result for result in every if result["seed"] < 1000]
    return sorted(found, key=lambda result: ("smollm2" not in result["model"], result["length"]))


def passkey_table(results: list[Row]) -> Iterator[str]:
    """Keys found and read, by length."""
    heads = ["model", "tokens", "trials", "ranked first", "worst rank", "chosen"]
    yield f"| {' | '.join(heads)} | right: memory | pasted | oracle | 3,000 tokens |"
    yield f"|{'---|' * 10}"
    for row in results:
        ways = " | ".join(str(row[f"right_{way}"]) for way in ("memory", "pasted", "oracle", "ceiling"))
        found = f"{row['trials']} | {row['rank_0']} | {row['rank_worst']} | {row['chosen']}"
        yield f"| {row['model']} | {row['length']:,} | {found} | {ways} |"


def selecting_table(result: Row) -> Iterator[str]:
    """What each selector finds: the block with the answer ranked first, all of it read, and the answer right."""
    kinds = result["counts"]
    yield f"| selector | {' | '.join(f'{kind}: first, median rank, read, right' for kind in kinds)} |"
    yield f"|---|{'---|' * len(kinds)}"
    for name in next(iter(kinds.values())):
        cells = [
            f"{row['first']}, {row['median rank']:g}, {row['read']}, {row['right']} of {row['trials']}"
            for row in (counts[name] for counts in kinds.values())
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def coding_table(result: Row) -> Iterator[str]:
    """What each dtype costs, as the mean over the books; of the loss also the worst."""
    yield "| stored as | bytes a number | loss | the most of any book | KL, nats | logits | same token |"
    yield "|---|---|---|---|---|---|---|"
    for row in result["rows"]:
        books = row["books"].values()
        mean = {key: sum(book[key] for book in books) / len(books) for key in next(iter(books))}
        worst = max((book["loss_change"] for book in books), key=abs)
        yield (
            f"| {row['dtype']} | {row['bytes_a_value']:.3f} | {mean['loss_change']:+.3%} | {worst:+.3%} "
            f"| {mean['kl']:.1e} | {mean['logit_error']:.3f} | {mean['same_token']:.1%} |"
        )


def encode_table(result: Row) -> Iterator[str]:
    """What encoding takes beside the bare forward passes."""
    yield "| stored as | CPU s | ÷ bare | s | ÷ bare | bytes a number |"
    yield "|---|---|---|---|---|---|"
    for name, row in result["ways"].items():
        size = f"{row['bytes_a_value']:.2f}" if "bytes_a_value" in row else ""
        figures = f"{row['cpu_s']:.1f} | {row['cpu_ratio']:.2f} | {row['wall_s']:.1f} | {row['wall_ratio']:.2f}"
        yield f"| {'nothing: bare' if name == 'bare' else name} | {figures} | {size} |"


SCORES = {
    "coverage": "`coverage`",
    "scouting": "share of the best block while it is scouted for",
    "memory": "attention that the memories held",
    "passage": "attention that the heaviest passage held",
    "focus": "how little it is spread over passages (negative entropy)",
    "confidence": "mean log probability of the answer's first tokens",
}


def answerable_table(result: Row) -> Iterator[str]:
    """How well each score parts questions with an answer in the memories from those without."""
    yield "| score | questions | with and without an answer | AUC | true positives at 10 % false ones |"
    yield "|---|---|---|---|---|"
    for name, kinds in result["summary"].items():
        for kind, row in kinds.items():
            counts = f"{row['answered']}, {row['unanswered']}"
            yield f"| {SCORES[name]} | {kind} | {counts} | {row['auc']:.2f} | {100 * row['true_positives']:.0f} % |"


ASKED = {
    "memory": "memory",
    "chunks": "chunks by BM25, pasted",
    "first": "the first tokens that fit, pasted",
    "nothing": "nothing",
    "verse": "the verse in 64 tokens, pasted",
}


def questions_table(result: Row) -> Iterator[str]:
    """Right answers, and medians of the time to the first token, by set and by what the model was given."""
    yield "| questions | the model has | right | the verse was read | first token: seconds of the clock, of CPU time |"
    yield "|---|---|---|---|---|"
    for kind in dict.fromkeys(row["set"] for row in result["questions"]):
        rows = [row["ways"] for row in result["questions"] if row["set"] == kind]
        for way, name in ASKED.items():
            mine = [row[way] for row in rows]
            wall, cpu = (statistics.median(each[unit] for each in mine) for unit in ("wall_s", "cpu_s"))
            counts = [sum(each[what] for each in mine) for what in ("right", "verse_read")]
            yield f"| {kind}, {len(rows)} | {name} | {counts[0]} | {counts[1]} | {wall:.2f}, {cpu:.2f} |"


def perplexity_table(result: Row) -> Iterator[str]:
    """Mean losses over all places, and at how many of them the smallest budget lowers the loss."""
    settings, places = result["settings"], list(result["places"].values())
    budgets, fits = settings["budgets"], settings["fits"]
    named = [f"{budget:,}" for budget in budgets]
    heads = ["tokens before", "none", *(f"text, {each}" for each in named), *(f"memory, {each}" for each in named)]
    yield f"| {' | '.join([*heads, 'lower at', 'all of it as text', 'as one window'])} |"
    yield f"|{'---|' * (len(heads) + 3)}"

    def mean(name: str) -> str:
        return f"{statistics.mean(place[name] for place in places):.3f}"

    for length in (fits, *settings["lengths"]):
        read = [f"windows, {each}" if length == fits else f"memory, {length}, {each}" for each in budgets]
        lower = sum(place[read[0]] < place["local"] for place in places)
        exact = [mean("full"), mean("one window")] if length == fits else ["", ""]
        figures = [mean(name) for name in ("local", *(f"tail, {each}" for each in budgets), *read)]
        yield f"| {' | '.join([f'{length:,}', *figures, f'{lower} of {len(places)}', *exact])} |"


def choose_table(result: Row) -> Iterator[str]:
    """CPU seconds of reading prompts, and of choosing what is read for them, by the length of the memory."""
    seconds = result["cpu_and_wall_seconds"]
    prompts = sorted({int(name.split("/")[1]) for name in seconds if name.startswith("plain/")})
    lengths = sorted({int(name.split("/")[1]) for name in seconds if name.startswith("token/")})
    heads = [f"{prompt:,} tokens: plain, with memory, of it choosing" for prompt in prompts]
    yield f"| tokens in memory | {' | '.join(heads)} | the first once more | a token, ms |"
    yield f"|---|{'---|' * (len(prompts) + 2)}"
    for length in lengths:
        cells = [
            f"{seconds[f'plain/{prompt}'][0]:.2f}, {seconds[f'prefill/{length}/{prompt}'][0]:.2f}, "
            f"{seconds[f'choose/{length}/{prompt}'][0]:.2f}"
            for prompt in prompts
        ]
        again = f"{seconds[f'prefill/{length}/{prompts[0]}/again'][0]:.2f}"
        yield f"| {length:,} | {' | '.join(cells)} | {again} | {1000 * seconds[f'token/{length}'][0]:.0f} |"


def tables() -> list[str]:
    return [
        "\n".join(passkey_table(load_passkeys())),
        "\n".join(selecting_table(load_result("selecting"))),
        "\n".join(questions_table(load_result("questions"))),
        "\n".join(perplexity_table(load_result("perplexity"))),
        "\n".join(answerable_table(load_result("answerable"))),
        "\n".join(choose_table(load_result("choose"))),
        "\n".join(coding_table(load_result("coding"))),
        "\n".join(encode_table(load_result("encode"))),
    ]
