"""``memstore generate``: let a model answer from memories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memstore
from memstore.cli.common import (
    DtypeOption,
    JsonOption,
    ModelOption,
    StoreOption,
    load_model,
    matching,
    open_store,
    out,
    write_json,
)
from memstore.errors import MemoryNotFoundError

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.provenance import Reading
    from memstore.store import MemoryStore

MOST_PASSAGES = 5
EXCERPT = 200  # characters of a passage that are shown


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
    explain: Annotated[bool, typer.Option("--explain", help="Show the passages that were read.")] = False,
    dtype: DtypeOption = "float32",
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt with memories attached to the model that wrote them."""
    with open_store(store, "r") as opened:
        memories = _chosen(opened, memory)  # a wrong name is told before the model is loaded
        loaded, tokenizer = load_model(model, dtype)
        with memstore.attach(loaded, *memories, explain=explain) as attached:
            text = attached.generate(prompt, tokenizer=tokenizer, max_new_tokens=max_new_tokens, num_beams=num_beams)
            passages = _passages(attached.provenance(), memories) if explain else []
    if as_json:
        write_json(
            {"text": text, "memories": [m.name for m in memories], **({"passages": passages} if explain else {})}
        )
        return
    out.print(text, soft_wrap=True)
    for passage in passages:
        where = f"{passage['document']}, tokens {passage['start_token']}–{passage['end_token']}"
        out.print(f"\n{passage['share']:.1%} of attention: {where}", style="dim", soft_wrap=True)
        if "text" in passage:
            out.print(" ".join(passage["text"].split())[:EXCERPT], soft_wrap=True)


def _chosen(store: MemoryStore, names: Iterable[str]) -> list[Memory]:
    """The memories of these names and patterns, each once. Raises MemoryNotFoundError for one that fits none."""
    found: dict[str, Memory] = {}
    for name in names:
        memories = matching(store, name)
        if not memories:
            raise MemoryNotFoundError(
                f"The store {store.path} holds no memory named {name!r}, and none whose name fits it as a pattern."
            )
        found |= {memory.name: memory for memory in memories if memory.name not in found}
    return list(found.values())


def _passages(readings: Iterable[Reading], memories: list[Memory]) -> list[dict[str, Any]]:
    from memstore.provenance import heaviest  # needs torch, which no other command loads

    by_name = {memory.name: memory for memory in memories}
    return [
        _passage(by_name[passage.document], passage.start_token, passage.end_token) | {"share": passage.share}
        for passage in heaviest(readings, MOST_PASSAGES)
    ]


def _passage(memory: Memory, start_token: int, end_token: int) -> dict[str, Any]:
    passage: dict[str, Any] = {"document": memory.name, "start_token": start_token, "end_token": end_token}
    if memory.text is not None:
        start, end = memory.chars(start_token, end_token)
        passage |= {"start_char": start, "end_char": end, "text": memory.text[start:end]}
    return passage
