"""``memstore check``: what an index loses, judged by what the model itself asks, and how to tune it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from memstore.cli.common import (
    DtypeOption,
    JsonOption,
    ModelOption,
    StoreOption,
    complain,
    err,
    load_model,
    open_store,
    out,
    write_json,
)
from memstore.cli.library import NameArgument
from memstore.errors import ReadOnlyStoreError

if TYPE_CHECKING:
    from memstore.checking import CheckReport, Tuning
    from memstore.quality import Quality
    from memstore.store import MemoryStore


def check(
    name: NameArgument,
    model: ModelOption,
    store: StoreOption = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="The index to check. Default: the configured one.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            min=1,
            help="Keys searched for each query. Default: what reading asks for.",
            show_default=False,
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Find the cheapest setting that reaches the target, and store it with the index. "
            "Exit status 1 if none does; then the best is stored.",
        ),
    ] = False,
    target_mass: Annotated[
        float | None,
        typer.Option(
            "--target-mass",
            help="With --tune: the share to keep of the attention mass that exact search with the same top-k captures, "
            "above 0 and at most 1. Default: index.auto.target_mass of the configuration, 0.99.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Hold an index against exact search, by a sample of what the model itself asks of the memory."""
    if target_mass is not None and not (tune and 0 < target_mass <= 1):
        raise typer.BadParameter("goes with --tune, and lies above 0 and up to 1.", param_hint="--target-mass")
    with open_store(store, "r") as opened:
        opened[name]  # a wrong name is told before the model is loaded
    loaded, _ = load_model(model, dtype)
    with _open(store, must_write=tune) as opened, err.status(f"Checking {name} …"):
        report = opened.check(name, loaded, backend=backend, k=top_k, tune=tune, target_mass=target_mass)
    if as_json:
        write_json(report.model_dump(mode="json"))
    else:
        _print(report)
    if report.tuning is not None and not report.tuning.reached:
        complain(_missed(report, report.tuning))
        raise typer.Exit(1)


def _open(path: Path | None, must_write: bool) -> MemoryStore:
    """The store, for writing if it can be: the sample of queries is worth keeping, but no check depends on it."""
    try:
        return open_store(path, "a")
    except ReadOnlyStoreError:
        if must_write:
            raise
        return open_store(path, "r")


def _print(report: CheckReport) -> None:
    settings = "".join(f", {key} {value}" for key, value in report.options.items() if value is not None)
    out.print(
        f"{report.name}: {report.backend}{settings}; the best {report.k:,} of {report.num_tokens:,} keys for each of "
        f"{report.total.num_queries:,} queries",
        soft_wrap=True,
    )
    table = Table("layer", box=None, pad_edge=False)
    for column in (f"recall@{report.k}", "mass", "exact mass", "kept", "error", "wall µs", "CPU µs"):
        table.add_column(column, justify="right", overflow="fold")
    for layer in report.layers:
        table.add_row(str(layer.layer), *_row(layer))
    table.add_row("total", *_row(report.total), style="bold")
    out.print(table)
    total = report.total
    out.print(
        f"Of all attention, exact search with this k captures {total.exact_mass:.1%}. The index keeps {total.kept:.2%} "
        f"of that, and finds {total.recall:.1%} of the same keys. The attention read from what it finds is "
        f"{total.error:.1%} off that of exact search.",
        soft_wrap=True,
    )
    if report.tuning is not None and report.tuning.options:
        for trial in report.tuning.trials:
            out.print(
                f"Tried {_words(trial.options)}: keeps {trial.total.kept:.2%}, {trial.total.cpu_us:.1f} µs of CPU time",
                soft_wrap=True,
            )
        if report.tuning.reached:
            reached = f"the cheapest that keeps {report.tuning.target_mass:.2%}."
            out.print(f"Stored {_words(report.tuning.options)}: {reached}", soft_wrap=True)
    for note in report.notes:
        out.print(f"Note: {note}", soft_wrap=True)


def _row(quality: Quality) -> list[str]:
    shares = [quality.recall, quality.mass, quality.exact_mass, quality.kept, quality.error]
    return [*(f"{share:.4f}" for share in shares), f"{quality.wall_us:.1f}", f"{quality.cpu_us:.1f}"]


def _words(options: dict[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _missed(report: CheckReport, tuning: Tuning) -> str:
    target, kept = f"{tuning.target_mass:.2%}", f"{report.total.kept:.2%}"
    aim = f"{target} of the attention mass that exact search with the same top-k captures"
    if not tuning.options:
        return f"The index does not keep {aim}, but {kept}, and has nothing to tune. Another backend may keep more."
    return (
        f"No setting keeps {aim}. The best, {_words(tuning.options)}, keeps {kept}; it is stored all the same. Another "
        "backend may keep more."
    )
