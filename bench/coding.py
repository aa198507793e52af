"""What does a smaller dtype cost: how much worse does a model go on after a memory that is kept in it?

    python bench/coding.py

SmolLM2-135M in float32 reads the first 2,000 tokens of a book in one window; its keys (before rotation) and values are
coded as a store would keep them, and decoded. The plain model then reads the next 512 tokens over them, and is compared
with itself over what was not coded: the loss of those tokens, the divergence of its predictions (KL, nats a token), the
error of its logits, and how often the most likely token is the same.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from memstore import assets
from memstore.coding import Stretch, decoded, encoded
from memstore.manifest import PartSpec, storable
from memstore.reading.rotary import rotate
from memstore.registry import adapter_for

RESULT = Path(__file__).parent / "results" / "coding.json"
BOOKS = ("Esther", "Ruth", "Romans")
MEMORY, NEXT = 2000, 512


def kept(rows: Tensor, spec: PartSpec) -> Tensor:
    """Rows [n, G, c] as they come back from a store."""
    if not spec.is_coded:
        return rows.to(getattr(torch, spec.dtype)).float()
    record = torch.frombuffer(encoded(rows, spec), dtype=torch.uint8)
    return decoded([Stretch(record, len(rows), 0, len(rows))], spec)


class Book:
    """A book of which the first tokens are read."""

    def __init__(self, adapter: Any, tokenizer: Any, name: str) -> None:
        ids = tokenizer(assets.book_text(name)[0][: 8 * (MEMORY + NEXT)])["input_ids"][: MEMORY + NEXT]
        self.adapter, self.ids = adapter, torch.tensor(ids)[None]
        self.parts = {part: rows[0] for part, rows in adapter.encode(self.ids[:, :MEMORY]).items()}
        self.turns = adapter.rotary_at(0, self.parts["keys.0"], torch.arange(MEMORY)[None])
        self.plain = self.predictions(None)

    def predictions(self, dtype: str | None) -> Tensor:
        """Log probabilities [NEXT, vocabulary] after a memory kept as ``dtype``; None: not coded."""
        cache = DynamicCache()
        specs = {} if dtype is None else self.adapter.parts(dtype)
        rows = {part: kept(each, specs[part]) if specs else each for part, each in self.parts.items()}
        for layer in range(len(self.adapter.self_attentions)):
            keys, values = (rows[f"{part}.{layer}"].transpose(0, 1)[None] for part in ("keys", "values"))
            cache.update(rotate(keys, *self.turns), values, layer)
        positions = torch.arange(MEMORY, MEMORY + NEXT)[None]
        inputs = {"input_ids": self.ids[:, MEMORY:], "position_ids": positions, "past_key_values": cache}
        return self.adapter.model(**inputs).logits[0].log_softmax(-1)

    def loss(self, predictions: Tensor) -> float:
        return float(-predictions[:-1].gather(1, self.ids[0, MEMORY + 1 :, None]).mean())

    def compare(self, dtype: str) -> dict[str, float]:
        found = self.predictions(dtype)
        plain, loss = self.plain, self.loss(self.plain)
        return {
            "loss_change": (self.loss(found) - loss) / loss,
            "kl": float((plain.exp() * (plain - found)).sum(-1).mean()),
            "logit_error": float((found - plain).square().mean().sqrt()),
            "same_token": float((found.argmax(-1) == plain.argmax(-1)).float().mean()),
        }


def bytes_a_value(parts: dict[str, PartSpec]) -> float:
    """Of keys and values, with all that is kept beside them, in records of 4,096 tokens."""
    values = sum(4096 * spec.shape[0] * spec.shape[1] for spec in parts.values() if spec.every == 1)
    return sum(spec.num_bytes(4096) for spec in parts.values()) / values


def measure(books: Sequence[str]) -> list[dict[str, Any]]:
    path = assets.smollm2()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    adapter, tokenizer = adapter_for(model)(model), AutoTokenizer.from_pretrained(path)
    read = [Book(adapter, tokenizer, name) for name in books]
    rows = []
    for dtype in storable("kv")[1:]:
        each = {name: book.compare(dtype) for name, book in zip(books, read, strict=True)}
        rounded = {name: {key: float(f"{value:.3g}") for key, value in row.items()} for name, row in each.items()}
        rows.append({"dtype": dtype, "bytes_a_value": round(bytes_a_value(adapter.parts(dtype)), 4), "books": rounded})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", nargs="+", default=BOOKS)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = measure(args.books)
    args.out.write_text(json.dumps({"tokens": MEMORY, "next": NEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
