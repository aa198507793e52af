"""The demo: one process reads four books of the Bible, another answers from them.

``python -m memstore.demo read STORE`` and ``python -m memstore.demo answer STORE`` are the two processes that
``memstore demo`` starts one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import memstore
from memstore import assets
from memstore.cli.common import complain, load_model, size
from memstore.cli.index import ReadingProgress
from memstore.errors import AssetError, MemoryExistsError, MemstoreError
from memstore.memory import Memory
from memstore.store import MemoryStore

BOOKS = ("Ruth", "Esther", "Jonah", "Daniel")
NEW_TOKENS = 32
MOST_PASSAGES = 3


class Question(NamedTuple):
    """A question and the word of the text that answers it."""

    text: str
    answer: str


QUESTIONS = (
    Question("What was the name of Naomi's husband?", "Elimelech"),
    Question("What did Boaz tell Ruth to dip her morsel in?", "vinegar"),
    Question("What did Boaz give Ruth six measures of?", "barley"),
    Question("What did the king hold out to Esther?", "sceptre"),
    Question("Into what den was Daniel cast?", "lions"),
)


def default_store() -> Path:
    """The demo's own store, which it may overwrite."""
    return assets.cache_dir() / "demo"


def run(store: Path | None, as_json: bool) -> None:
    """Both processes, one after the other. Raises AssetError if one of them fails."""
    folder = default_store() if store is None else store
    for step in ("read", "answer"):
        command = [sys.executable, "-m", "memstore.demo", step, str(folder), *(["--json"] if as_json else [])]
        if subprocess.run(command).returncode:
            raise AssetError(f"The demo's process `{' '.join(command[1:])}` failed; its message stands above.")


def _short(path: Path) -> str:
    """The path as people write it, from their home folder."""
    return str(Path("~") / path.relative_to(Path.home()) if path.is_relative_to(Path.home()) else path)


def read(store: Path, console: Console) -> None:
    """The first process: read every book that the store does not hold yet."""
    path = assets.smollm2()
    console.print(f"[bold]Process 1[/] reads {len(BOOKS)} books with SmolLM2-135M into {_short(store)}")
    model, tokenizer = load_model(str(path), "float32")
    with memstore.open(store) as library:
        for book in BOOKS:
            known = book in library
            memory = _read_book(library, model, tokenizer, book)
            note = ", read in an earlier run" if known else ""
            console.print(f"  {book}: {memory.num_tokens:,} tokens, {size(memory.nbytes)}{note}")
    console.print("[bold]Process 1[/] ends.\n")


def _read_book(library: MemoryStore, model: Any, tokenizer: Any, book: str) -> Memory:
    text = assets.book_text(book)[0]
    with ReadingProgress(book) as progress:
        try:
            return library.encode(model, tokenizer, text, name=book, dtype="float16", progress=progress)
        except MemoryExistsError:  # an earlier version of memstore read it in another way
            if library.path != default_store().resolve():
                raise
            del library[book]
            return library.encode(model, tokenizer, text, name=book, dtype="float16", progress=progress)


def answers(store: Path) -> Iterator[dict[str, Any]]:
    """The second process: each question, answered without and with the memory of all books, and what was read."""
    from memstore.reading.chat import chat_frame

    model, tokenizer = load_model(str(assets.smollm2()), "float32")
    with memstore.open(store, mode="r") as library:
        books = [library[book] for book in BOOKS]
        for question in QUESTIONS:
            frame = chat_frame(tokenizer)
            chat = tokenizer(frame.before + question.text + frame.after, add_special_tokens=False, return_tensors="pt")
            plain = cast(Any, model).generate(**chat, max_new_tokens=NEW_TOKENS, do_sample=False)
            with memstore.attach(model, *books, explain=True) as attached:
                answer = attached.generate(
                    question.text, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False
                )
                passages = attached.provenance().passages(MOST_PASSAGES)
            yield {
                "question": question.text,
                "in_the_text": question.answer,
                "without_memory": tokenizer.decode(plain[0, chat.input_ids.shape[1] :], skip_special_tokens=True),
                "with_memory": answer,
                "read": [
                    {
                        "verses": assets.verses_at(passage.document, *library[passage.document].chars(*passage[1:3])),
                        "text": library[passage.document].passage(*passage[1:3]),
                        "share": passage.share,
                    }
                    for passage in passages
                ],
            }


def show(result: dict[str, Any], console: Console) -> None:
    """One question with both answers and the passages that were read."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("without memory", Text(result["without_memory"].strip()))  # a model may well write "[/]"
    table.add_row("with memory", Text(result["with_memory"], "bold green"))
    table.add_row("in the text", result["in_the_text"])
    for passage in result["read"]:
        excerpt = " ".join(passage["text"].split())
        where = f"{passage['share']:6.1%} {passage['verses']}"
        table.add_row("read", Text.assemble((where, "cyan"), " ", (f"{excerpt[:120]}…", "dim")))
    console.print(Panel(table, title=f"[bold]{result['question']}[/]", title_align="left"))


def main(step: str, folder: str, *flags: str) -> None:
    """One of the two processes."""
    as_json = "--json" in flags
    console = Console(stderr=as_json)
    if step == "read":
        read(Path(folder), console)
        return
    console.print(f"[bold]Process 2[/] attaches {', '.join(BOOKS)} to a freshly loaded model and answers")
    results = []
    for result in answers(Path(folder)):
        results.append(result)
        if not as_json:
            show(result, console)
    if as_json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MemstoreError as error:
        complain(str(error))
        sys.exit(1)
