"""What the benchmarks found, from the JSON they wrote: the tables of bench/README.md, and pictures.

python bench/report.py        prints the tables, writes the pictures results/*.svg
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report_decoder_only
from report_decoder_only import RESULTS, SCORES, Row, load_result

K = 256
TARGET = 0.99  # of the mass that the k best keys hold


def load() -> list[Row]:
    """The results of `bench/index.py` on the CPU, one for each dataset."""
    files = sorted(file for file in RESULTS.glob("index-*.json") if "quick" not in file.stem)
    return [json.loads(file.read_text()) for file in files]


def load_reader() -> Row:
    """The result of `bench/read_long.py`."""
    return load_result("reader")


def curves(size: Row, k: int = K) -> dict[tuple[str, str], list[Row]]:
    """What each index, by name and dtype, found for k keys, with its tunable option from cheap to dear."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in size["searches"]:
        if row["k"] == k:
            found[row["backend"], row["dtype"]].append(row)
    return found


def cheapest(rows: list[Row]) -> Row:
    """The cheapest that reaches the target, or else the one that finds most."""
    good = [row for row in rows if row["share"] >= TARGET]
    return min(good, key=lambda row: row["cpu_ms"]) if good else max(rows, key=lambda row: row["share"])


def index_table(results: list[Row]) -> Iterator[str]:
    """For the largest size of each dataset, what each index costs to reach the target."""
    heads = "keys, index, stored as, build s, peak, file, option, CPU ms, exact ÷ this, recall, mass, share"
    yield f"| {heads.replace(', ', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for result in results:
        size = max(result["sizes"], key=lambda size: size["n"])
        builds = {(build["backend"], build["dtype"]): build for build in size["builds"]}
        best = {key: cheapest(rows) for key, rows in curves(size).items()}
        for (name, dtype), row in best.items():
            build = builds[name, dtype]
            option = f"{row['option']} {row['value']}" if row["option"] else ""
            ratio = best["exact", dtype]["cpu_ms"] / row["cpu_ms"]
            cells = (
                f"`{result['dataset']}`, {size['n']:,} × {size['d']}",
                f"`{name}`",
                dtype,
                f"{build['cpu_s']:.1f}",
                f"{build['peak_of_vectors']:.2f}",
                f"{build['saved_of_vectors']:.2f}",
                option,
                f"{row['cpu_ms']:.1f}",
                f"{ratio:.2g}",
                f"{row['recall']:.3f}",
                f"{row['mass']:.3f}",
                f"{row['share']:.3f}",
            )
            yield f"| {' | '.join(cells)} |"


def reading_table(result: Row) -> Iterator[str]:
    """The bandwidth of a sum and of the fused read, by dtype and rows of queries."""
    counts = [read["queries"] for read in result["cases"][0]["reads"]]
    yield f"| stored as | sum, GB/s | {' | '.join(f'read, {m}' for m in counts)} |"
    yield f"|---|---|{'---|' * len(counts)}"
    for case in result["cases"]:
        shares = [f"{read['read_gb_s']:.1f} ({read['share']:.0%})" for read in case["reads"]]
        yield f"| {case['dtype']} | {case['sum_gb_s']:.1f} | {' | '.join(shares)} |"


WAYS = {"memory_all": "memory, all of it", "memory_256": "memory, top 256", "truncated": "truncated"}


def share(row: Row) -> str:
    """An accuracy with its interval, in percent."""
    return f"{100 * row['accuracy']:.1f} ({' to '.join(f'{100 * end:.1f}' for end in row['interval'])})"


def reader_table(result: Row) -> Iterator[str]:
    """Keys that the trained reader wrote in full, in percent, by the length of the document."""
    yield f"| tokens | trials | {' | '.join(WAYS.values())} | its digits: all, top 256 | attention there |"
    yield f"|---|---|{'---|' * len(WAYS)}---|---|"
    for row in result["lengths"]:
        shares = " | ".join(share(row[way]) for way in WAYS)
        digits = ", ".join(f"{100 * row[way]['digits']:.1f}" for way in ("memory_all", "memory_256"))
        yield f"| {row['length']:,} | {row['trials']} | {shares} | {digits} | {100 * row['needle_mass']:.1f} |"


def searches(rows: list[Row]) -> list[Row]:
    """Of each index the cheapest search that reaches the target, or else the one that finds most."""
    found = []
    for index in dict.fromkeys(row["index"] for row in rows):
        mine = [row for row in rows if row["index"] == index]
        good = [row for row in mine if row["mass"] >= TARGET]
        found.append(min(good, key=lambda row: row["cpu_ms"]) if good else max(mine, key=lambda row: row["mass"]))
    return found


def decode_reader_table(result: Row) -> Iterator[str]:
    """What a step of the trained reader costs: over everything, and with the cheapest search of each index."""
    yield "| reads | CPU ms a step | ÷ plain | attention mass | of the worst head |"
    yield "|---|---|---|---|---|"
    for name, row in result["steps"].items():
        what, _, dtype = name.partition(", ")
        shown = f"everything, stored in {dtype}" if what == "all" else "no memory: the plain model over 1,024"
        yield f"| {shown} | {row['cpu_ms']:.1f} | {row['ratio']:.1f} | | |"
    for row in searches(result["retrieval"]):
        options = "".join(f", `{name}` {row[name]}" for name in ("nprobe", "k_factor", "ef_search") if name in row)
        yield (
            f"| the best {row['k']} by `{row['index']}`{options} | {row['cpu_ms']:.1f} | {row['ratio']:.1f} "
            f"| {row['mass']:.3f} | {row['worst_head']:.3f} |"
        )


def decode_base_table(rows: list[Row]) -> Iterator[str]:
    """What a step costs in the geometry of BART-base, in CPU ms, by length, batch and beams."""
    shapes = list(dict.fromkeys((row["batch"], row["beams"]) for row in rows))
    yield f"| memory, tokens | {' | '.join(f'batch {batch}, beams {beams}' for batch, beams in shapes)} |"
    yield f"|---|{'---|' * len(shapes)}"
    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    by_case = {(row["tokens"], row["batch"], row["beams"]): row for row in rows}
    cells = [f"{by_case[lengths[0], *shape]['plain']['cpu_ms']:,.0f}" for shape in shapes]
    yield f"| none: plain, over 1,024 | {' | '.join(cells)} |"
    for n in lengths:
        cells = [f"{by_case[n, *shape]['exact']['cpu_ms']:,.0f}" for shape in shapes]
        yield f"| {n:,} | {' | '.join(cells)} |"


def attach_table(rows: list[Row]) -> Iterator[str]:
    """What attaching costs in a new process, in seconds of CPU time and of the clock."""
    parts = ("model", "fingerprint", "attach", "first_step", "second_step")
    yield f"| memory, tokens | {' | '.join(part.replace('_', ' ') for part in parts)} |"
    yield f"|---|{'---|' * len(parts)}"
    for row in rows:
        cells = [f"{row[f'{part}_cpu']:.2f} ({row[f'{part}_wall']:.2f})" for part in parts]
        yield f"| {row['tokens']:,} | {' | '.join(cells)} |"


def tables() -> list[str]:
    decode = load_result("decode")
    return [
        "\n".join(index_table(load())),
        "\n".join(reading_table(load_result("reading"))),
        "\n".join(reader_table(load_reader())),
        "\n".join(decode_reader_table(decode["reader"])),
        "\n".join(decode_base_table(decode["base"])),
        "\n".join(attach_table(decode["attach"])),
        *report_decoder_only.tables(),
    ]


def pyplot() -> Any:
    """matplotlib, which writes the same file for the same figures."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "memstore"
    return plt


def draw_reader(result: Row, path: Path) -> None:
    """Accuracy over the length of the document, with its 95 % interval."""
    figure, axis = pyplot().subplots(figsize=(8, 4))
    lengths = [row["length"] for row in result["lengths"]]
    for i, (way, label) in enumerate(WAYS.items()):
        rows = [row[way] for row in result["lengths"]]
        axis.plot(lengths, [row["accuracy"] for row in rows], marker="o", markersize=4, color=f"C{i}", label=label)
        low, high = zip(*(row["interval"] for row in rows), strict=True)
        axis.fill_between(lengths, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
    axis.axhline(result["plain"]["accuracy"], color="grey", linewidth=0.8, linestyle="--", label="plain, in its window")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axis.set(ylim=(-0.02, 1.05), xlabel="tokens of the document", ylabel="keys written in full")
    axis.grid(alpha=0.2)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_answerable(result: Row, path: Path) -> None:
    """The ROC of every score on the held-out questions, and that of coverage on questions that are near."""
    figure, axis = pyplot().subplots(figsize=(6, 5))
    kinds = result["summary"]
    for i, (name, row) in enumerate((name, row["held-out"]) for name, row in kinds.items()):
        wide = 2 if name == "coverage" else 1
        axis.step(*zip(*row["curve"], strict=True), where="post", color=f"C{i}", linewidth=wide, label=SCORES[name])
    near = kinds["coverage"]["near"]["curve"]
    axis.step(*zip(*near, strict=True), where="post", color="C0", linestyle=":", label="`coverage`, near questions")
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.6, linestyle="--")
    axis.set(xlabel="false positives: no answer, and let pass", ylabel="true positives", xlim=(-0.01, 1.01))
    axis.grid(alpha=0.2)
    axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw(results: list[Row], path: Path) -> None:
    """One panel for each dataset, at its largest size: a curve for each index over its tunable option, k = 256."""
    plt = pyplot()
    names = sorted({row["backend"] for result in results for size in result["sizes"] for row in size["searches"]})
    lines = -(-len(results) // 3)
    figure, grid = plt.subplots(lines, 3, figsize=(13, 4 * lines), squeeze=False)
    axes = grid.flatten()
    for axis in axes[len(results) :]:
        axis.set_axis_off()
    for axis, result in zip(axes, results, strict=False):
        size = max(result["sizes"], key=lambda size: size["n"])
        for (name, dtype), rows in curves(size).items():
            axis.plot(
                [row["cpu_ms"] for row in rows],
                [row["share"] for row in rows],
                marker="o",
                markersize=4,
                markerfacecolor="none" if dtype == "float32" else None,
                linewidth=1,
                linestyle="-" if dtype == "bfloat16" else ":",
                color=f"C{names.index(name)}",
                label=f"{name}, {dtype}",
            )
        axis.set(
            xscale="log",
            ylim=(0, 1.05),
            xlabel="CPU ms for 64 queries",
            title=f"{result['dataset']}, {size['n']:,} × {size['d']}",
        )
        axis.axhline(TARGET, color="grey", linewidth=0.6, linestyle="--")
        axis.grid(alpha=0.2)
        axis.set_ylabel(f"attention mass, share of the {K} best keys'")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    print("\n\n".join(tables()))
    draw(load(), RESULTS / "index.svg")
    draw_reader(load_reader(), RESULTS / "reader.svg")
    draw_answerable(load_result("answerable"), RESULTS / "answerable.svg")


if __name__ == "__main__":
    main()
