"""``memstore generate``: let a model answer from memories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

import memstore
from memstore.cli.common import (
    DtypeOption,
    JsonOption,
    ModelOption,
    StoreOption,
    load_model,
    open_store,
    out,
    write_json,
)
from memstore.errors import AttachError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.memory import Memory
    from memstore.provenance import Provenance, Retrieved
    from memstore.store import MemoryStore

MOST_PASSAGES = 5
EXCERPT = 200  # characters of a passage that are shown

Fold = Literal["mean", "max", "each"]  # as memstore.provenance has it, which loads torch


def generate(
    model: ModelOption,
    memory: Annotated[
        list[str],
        typer.Option(
            "--memory",
            metavar="NAME",
            help="A memory to read, or a pattern such as 'gospel-*' for several; may be repeated.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask. An encoder-decoder may be asked nothing.", show_default=False)
    ] = None,
    store: StoreOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    num_beams: Annotated[int, typer.Option(min=1, help="Beams to search with.")] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the passages that each token was read from.")
    ] = False,
    heads: Annotated[Fold, typer.Option("--heads", help="With --explain: how heads are taken together.")] = "mean",
    layers: Annotated[Fold, typer.Option("--layers", help="With --explain: how layers are.")] = "mean",
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt with memories attached to the model that wrote them."""
    with open_store(store, "r") as opened:
        memories = _chosen(opened, memory)  # a wrong name is told before the model is loaded
        loaded, tokenizer = load_model(model, dtype)
        with memstore.attach(loaded, *memories, explain=explain) as attached:
            text = attached.generate(prompt, tokenizer=tokenizer, max_new_tokens=max_new_tokens, num_beams=num_beams)
            explained = _explained(attached.provenance(heads, layers), memories, tokenizer) if explain else {}
    if as_json:
        write_json({"text": text, "memories": [m.name for m in memories], **explained})
        return
    out.print(text, soft_wrap=True)
    if explain:
        _show(explained)


def _explained(provenance: Provenance, memories: list[Memory], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What was read, for JSON: totals of documents and passages, and for each token its readings, heaviest first."""
    by_name = {memory.name: memory for memory in memories}
    passages = [passage._asdict() for passage in provenance.passages(MOST_PASSAGES)]
    for passage in passages:
        if passage["start_char"] is not None:
            text = by_name[passage["document"]].text or ""
            passage["text"] = text[passage["start_char"] : passage["end_char"]]
    tokens: dict[int, dict[str, Any]] = {}
    for reading in provenance:
        token = tokens.setdefault(reading.step, {"step": reading.step, "token": reading.token, "readings": []})
        token["readings"].append(_without(reading._asdict(), "step", "row", "token"))
    for token in tokens.values():
        token["text"] = None if token["token"] is None else tokenizer.decode([token["token"]])
    for retrieved in (each for each in _retrieved(provenance) if each.step in tokens):
        tokens[retrieved.step].setdefault("retrieved", []).append(_without(retrieved._asdict(), "step", "row"))
    return {
        "documents": [document._asdict() for document in provenance.documents()],
        "passages": passages,
        "tokens": list(tokens.values()),
    }


def _retrieved(provenance: Provenance) -> list[Retrieved]:
    """Nothing where it is not known."""
    try:
        return provenance.retrieved()
    except AttachError:
        return []


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _show(explained: dict[str, Any]) -> None:
    """The same on a terminal: one line for each token, then the totals."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("token", "of attention", "heaviest passage"):
        table.add_column(header, justify="right" if header == "of attention" else "left")
    retrieved = [bound for token in explained["tokens"] for bound in token.get("retrieved", [])]
    if retrieved:
        table.add_column("memory retrieved", justify="right")
    for token in explained["tokens"]:
        best = max(token["readings"], key=lambda reading: float(reading["mass"]))
        shown = token["token"] if token["text"] is None else repr(token["text"])
        row = [Text(str(shown)), Text(f"{best['mass']:.1%}"), Text(_place(best))]
        table.add_row(*row, *([Text(_bounds(token["retrieved"]))] if retrieved else []))
    out.print()
    out.print(table)
    out.print()
    for document in explained["documents"]:
        out.print(f"{document['share']:.1%} of attention: {document['document']}", style="dim", soft_wrap=True)
    if retrieved:
        out.print(f"What was read held {_bounds(retrieved)} of the attention over the memories.", style="dim")
    for passage in explained["passages"]:
        out.print(f"\n{passage['share']:.1%} of attention: {_place(passage)}", style="dim", soft_wrap=True)
        if "text" in passage:
            out.print(" ".join(passage["text"].split())[:EXCERPT], soft_wrap=True)


def _chosen(store: MemoryStore, names: Iterable[str]) -> list[Memory]:
    """The memories of these names and patterns, each once. Raises MemoryNotFoundError for one that fits none."""
    found: dict[str, Memory] = {}
    for name in names:
        found |= {memory.name: memory for memory in store.matching(name) if memory.name not in found}
    return list(found.values())


def _place(passage: dict[str, Any]) -> str:
    where = f"{passage['document']}, tokens {passage['start_token']}–{passage['end_token']}"
    return (
        where if passage["start_char"] is None else f"{where}, characters {passage['start_char']}–{passage['end_char']}"
    )


def _bounds(retrieved: list[dict[str, Any]]) -> str:
    """The mean of some shares of attention, or of their bounds."""
    low, high = (f"{sum(each[name] for each in retrieved) / len(retrieved):.1%}" for name in ("low", "high"))
    return low if low == high else f"{low} to {high}"
