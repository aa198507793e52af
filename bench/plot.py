"""Draws what `bench/index.py` measured: the attention mass that a search finds, against its CPU time.

python bench/plot.py        reads results/index-*.json, writes results/index.svg
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
K = 256


def draw(results: list[dict], path: Path) -> None:
    """One panel for each dataset, at its largest size: one curve for each index over its tunable option, k = 256."""
    mpl.rcParams["svg.hashsalt"] = "memstore"  # the same file for the same figures
    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        size = max(result["sizes"], key=lambda size: size["n"])
        curves = defaultdict(list)
        for row in size["searches"]:
            if row["k"] == K:
                name = f"{row['backend']} {row['dtype']}" if row["backend"] == "exact" else row["backend"]
                curves[name].append((row["cpu_ms"], row["share"]))
        for name, points in curves.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1, label=name)
        axis.set(
            xscale="log",
            xlabel="CPU ms for 64 queries",
            title=f"{result['dataset']}, {size['n']:,} × {size['d']}",
        )
        axis.axhline(0.99, color="grey", linewidth=0.6, linestyle=":")
        axis.grid(alpha=0.2)
    axes[0][0].set_ylabel(f"attention mass found, share of the {K} best keys'")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    files = sorted(file for file in RESULTS.glob("index-*.json") if "quick" not in file.stem)
    draw([json.loads(file.read_text()) for file in files], RESULTS / "index.svg")


if __name__ == "__main__":
    main()
