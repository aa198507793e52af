"""A small reader, trained here: BART that finds the key hidden in a passage of at most 256 tokens, and writes it.

    python bench/train_reader.py        trains it once (minutes on two cores with AMX), and says how well it reads

The recipe is published, not the weights, which are kept in memstore's cache folder: `load_reader` returns the model and
its tokenizer. What matters in it:

- Passages are real prose, of 32 tokens at first and of up to 256 in the end; other numbers stand in many as decoys. No
  memory is used in training, and nothing longer than the window of 256 is ever read.
- When the digits' order has been learned, short passages stand anywhere in the window, so that all positions are
  learned where a step is cheap. (In the one run that began so, the order was not learned.)
- The loss is the key's cross-entropy, and minus the log of the attention that each head of each decoder layer gives to
  the digit that is written next: without such a hint the order of the digits was not learned in the first round.
- Cross-attention is trained at half of its usual scale, so that scores may lie further apart once the usual scale is
  back: a memory of n windows holds n times as many tokens that must weigh nothing. It was not shown to be needed.
- Positions start as waves, in which one place can be told from its neighbour by a linear map.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import reader_data
import torch
from reader_data import DIGITS, Ids, Passages, Task
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from memstore.assets import build_once, cache_dir
from memstore.memory import Memory
from memstore.store import MemoryStore

WINDOW = 256


class LongMemory(NamedTuple):
    """A memory with a key in it: its digits, and the token at which the needle begins."""

    memory: Memory
    key: str
    at: int


GEOMETRY: dict[str, Any] = {
    "d_model": 256,
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 512),
    "max_position_embeddings": WINDOW,
    "vocab_size": reader_data.VOCABULARY,
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
ANYWHERE, BEGINNING = True, False  # where a passage stands in the window, beginning with its first token or not


class Round(NamedTuple):
    """A part of the training with an optimizer and random numbers of its own.

    rate: the highest learning rate, after ``warm_up`` steps, from which it falls to nothing along half a cosine.
    plain_steps: how many steps at its beginning see no decoys. stages: steps, the lengths of passages to draw from,
    passages a step, and whether their positions begin with 0 or anywhere.
    """

    rate: float
    warm_up: int
    plain_steps: int
    stages: tuple[tuple[int, tuple[int, ...], int, bool], ...]


ROUNDS = (
    Round(
        1e-3,
        100,
        200,
        (
            (350, (32,), 64, BEGINNING),
            (300, (32, 64, 128), 32, BEGINNING),
            (450, (64, 128, 256, 256), 24, BEGINNING),
        ),
    ),
    Round(5e-4, 30, 0, ((200, (64,), 48, ANYWHERE), (200, (256,), 20, BEGINNING))),
)
DECOYS = 3  # at most, in a passage
POINTING = 0.2  # the weight of the attention's loss
SCALE = 0.5  # of cross-attention in training
SEED = 0
LOGGED = ("round", "step", "key", "pointing", "CPU s")


def new_model() -> BartForConditionalGeneration:
    """The untrained reader."""
    torch.manual_seed(SEED)
    model = BartForConditionalGeneration(BartConfig(**GEOMETRY, attn_implementation="eager"))
    for part in (model.model.encoder, model.model.decoder):
        weight = part.embed_positions.weight
        rates = torch.exp(-torch.arange(0, 1, 2 / weight.shape[1]) * math.log(1000))
        angles = torch.arange(len(weight))[:, None] * rates
        weight.data.copy_(torch.cat((angles.sin(), angles.cos()), 1) * 1.5 * model.config.init_std)
    return model


def targets(passages: Passages, end: int) -> tuple[Tensor, Tensor]:
    """What to write [b, 6], the digits and the end, and for each the place to look at: its digit, or the full stop."""
    ids = torch.from_numpy(passages.answers)
    stops = torch.from_numpy(passages.needle.shape[1] - 1 - passages.needle[:, ::-1].argmax(1))
    looked_at = stops[:, None] - DIGITS + torch.arange(DIGITS + 1)
    return torch.cat((ids, torch.full((len(ids), 1), end)), 1), looked_at


def loss_of(model: BartForConditionalGeneration, passages: Passages) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and of what it consists: the key's cross-entropy, and the attention's."""
    labels, looked_at = targets(passages, model.config.eos_token_id)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=torch.from_numpy(passages.ids), labels=labels, output_attentions=True)
    wanted = one_hot(looked_at, passages.ids.shape[1])[:, None]
    pointing = torch.stack(
        [-((given.float() * wanted).sum(-1) + 1e-6).log().mean() for given in output.cross_attentions]
    )
    return output.loss + POINTING * pointing.mean(), output.loss.detach(), pointing.mean().detach()


def train_round(model: BartForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, nth: int) -> list[list[float]]:
    """Train the model further, as the nth of `ROUNDS` says. Returns rows of what `LOGGED` names."""
    rate, warm_up, plain_steps, stages = ROUNDS[nth]
    task, rng = Task(tokenizer, held_out=False, seed=SEED + nth), random.Random(SEED + nth)
    positions = model.model.encoder.embed_positions
    first = positions.offset
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    steps = [stage for stage in stages for _ in range(stage[0])]
    log, began = [], time.process_time()
    for step, (_, lengths, count, anywhere) in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / warm_up) * (1 + math.cos(math.pi * step / len(steps))) / 2
        length = rng.choice(lengths)
        positions.offset = first + (rng.randrange(WINDOW - length + 1) if anywhere else 0)
        loss, *parts = loss_of(model, task.passages(count, length, DECOYS if step >= plain_steps else 0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 25 == 0:
            values = [nth, step + 1, *(round(part.item(), 4) for part in parts), round(time.process_time() - began)]
            log.append(values)
            print(", ".join(map("{} {}".format, LOGGED, values)), flush=True)
    positions.offset = first
    return log


def train(target: Path) -> None:
    """Train the reader and write it to ``target``, with its tokenizer and a log."""
    tokenizer, model = reader_data.train_tokenizer(), new_model()
    for layer in model.model.decoder.layers:
        layer.encoder_attn.scaling *= SCALE
    rows = [row for nth in range(len(ROUNDS)) for row in train_round(model, tokenizer, nth)]
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "log.json").write_text(json.dumps({"columns": LOGGED, "rows": rows}) + "\n")


def reader_folder() -> Path:
    """Where the trained reader lies; it is trained first if it does not. Another recipe has another folder."""
    digest = hashlib.sha256(
        json.dumps([GEOMETRY, ROUNDS, DECOYS, POINTING, SCALE, SEED, reader_data.TASK]).encode()
    ).hexdigest()[:12]
    return build_once(cache_dir() / "bench" / f"reader-{digest}", train)


def load_reader() -> tuple[BartForConditionalGeneration, PreTrainedTokenizerFast]:
    """The trained reader in float32, ready to read, and its tokenizer."""
    folder = reader_folder()
    model = BartForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def digits(written: Tensor) -> Ids:
    """The five tokens after the start of what was written [b, n], and -1 for what is missing."""
    return np.pad(written[:, 1 : DIGITS + 1].numpy(), ((0, 0), (0, DIGITS)), constant_values=-1)[:, :DIGITS]


def read(model: BartForConditionalGeneration, ids: Tensor) -> Ids:
    """What the plain model writes about passages [b, n]: ids [b, 5]."""
    with torch.no_grad():
        return digits(model.generate(input_ids=ids, max_new_tokens=DIGITS + 1, do_sample=False, num_beams=1))


def long_memory(store: MemoryStore, num_tokens: int, name: str = "long", seed: int = 0, **options: Any) -> LongMemory:
    """Read ``num_tokens`` tokens of held-out prose with one key at a random place into ``store``.

    The reader writes the key when it is given the memory and no prompt: what it asks meanwhile are real queries.
    options: of `store.encode`, such as ``dtype``.
    """
    model, tokenizer = load_reader()
    task = Task(tokenizer, held_out=True, seed=seed)
    hidden = task.hidden(task.excerpt(num_tokens))
    memory = store.encode(model, tokenizer, input_ids=hidden.ids, name=name, **options)
    return LongMemory(memory, tokenizer.decode(hidden.answer), hidden.at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    model, tokenizer = load_reader()
    for decoys in (0, 3):
        passages = Task(tokenizer, held_out=True, seed=1).passages(400, WINDOW, decoys)
        right = (read(model, torch.from_numpy(passages.ids)) == passages.answers).all(1).mean()
        print(f"held-out passages of {WINDOW} tokens, up to {decoys} decoys: {right:.1%} of 400 keys")


if __name__ == "__main__":
    main()
