"""SmolLM2-135M-Instruct over the whole King James Bible: keys of some layers, and queries of prompts about it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_mixed import SEED, some
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from memstore import assets
from memstore.assets import build_once, cache_dir
from memstore.hooks import base_attention, base_implementation, install
from memstore.reading.chat import chat_frame
from memstore.reading.rotary import DISTANCE, rotate, unrotate
from memstore.registry import adapter_for
from memstore.windows import plan

LAYERS = (4, 14)  # of 30; more only cost time
READ_AT_ONCE = 8  # windows

QUESTIONS = """
Who was the queen?; Who built the ark?; Where was Moses found as a child?; What did Jacob give Esau for his birthright?;
How many days did it rain?; Who sold Joseph into Egypt?; What did Ruth say to Naomi?; Who was cast among lions?;
Why did Jonah flee to Tarshish?; What did Solomon ask of God?; Who betrayed Jesus, and for how much?; Where was Paul
shipwrecked?; What are the ten commandments?; Who killed Goliath, and with what weapon?; What was written on the wall of
the king's palace?; How did the walls of Jericho fall?; What happened to Lot's wife?; Who was the father of John the
Baptist?; What did Pharaoh dream of?; Which river did Naaman wash himself in?; Who interpreted the dream of
Nebuchadnezzar?; What did Haman plan against the Jews?; How old was Methuselah when he died?; What does the Preacher say
about vanity?; Summarize the story of Samson and Delilah.; Which gifts did the wise men bring?; What is the fruit of the
Spirit?; List the twelve tribes of Israel.; What are the seven seals?; How was the tabernacle to be built?; What did Job
lose in one day?; Tell me about the prophet Elijah and the ravens.; Who wept by the rivers of Babylon?; What did Peter
deny three times?; What is charity, according to Paul?; Who climbed up into a sycomore tree?; What was in the ark of the
covenant?; Why was Saul rejected as king?; Which plagues came upon Egypt?; Who was raised from the dead at Bethany?
"""


def folder(which: str) -> Path:
    """A folder with keys [G, n, c] float16 and queries [G, m, c] float32 of one layer, named as ``L.G``."""
    folder = build_once(cache_dir() / "bench" / "smollm2-bible", _read_the_bible)
    return folder / which.split(".")[0]


def _read_the_bible(target: Path, report: Callable[..., Any] = print) -> None:
    path = assets.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model.model.layers = model.model.layers[: max(LAYERS) + 1]  # later layers change no key that is wanted
    adapter = adapter_for(model)(model)
    text = "\n\n".join(assets.book_text(book)[0] for book in assets.bible())
    ids = torch.tensor(tokenizer(text)["input_ids"])
    windows, prefix = plan(len(ids), adapter.rule(None, None)), torch.tensor(adapter.prefix(tokenizer))
    keys = {
        layer: np.lib.format.open_memmap(
            _made(target / str(layer)) / "keys.npy",
            "w+",
            np.float16,
            (adapter.num_kv_heads, len(ids), adapter.head_dim),
        )
        for layer in LAYERS
    }
    began = time.perf_counter()
    for start in range(0, len(windows), READ_AT_ONCE):
        group = windows[start : start + READ_AT_ONCE]
        inputs = torch.stack([torch.cat((prefix, ids[window.start : window.stop])) for window in group])
        with torch.inference_mode():
            encoded = adapter.encode(inputs)
        for layer in LAYERS:
            rows = encoded[f"keys.{layer}"][:, len(prefix) :].permute(0, 2, 1, 3).half().numpy()  # [b, G, T, c]
            for each, window in zip(rows, group, strict=True):
                kept = slice(window.keep_start - window.start, window.keep_stop - window.start)
                keys[layer][:, window.keep_start : window.keep_stop] = each[:, kept]
        if start // READ_AT_ONCE % 10 == 0:
            seconds = time.perf_counter() - began
            report(
                f"{group[-1].keep_stop:,} of {len(ids):,} tokens, {group[-1].keep_stop / seconds:.0f} a second",
                flush=True,
            )
    asked = _ask(model, adapter, tokenizer)
    for layer in LAYERS:
        keys[layer].flush()
        np.save(target / str(layer) / "queries.npy", asked[layer])


def _ask(model: Any, adapter: Any, tokenizer: Any) -> dict[int, np.ndarray]:
    """For each layer queries [G, QUERIES, c]."""
    frame = chat_frame(tokenizer)
    rng = random.Random(SEED)
    verses = [verse.text for verses in assets.bible().values() for verse in verses]
    questions = [question.strip() for question in " ".join(QUESTIONS.split()).split(";")]
    prompts = questions + [f"Explain this verse: {verse}" for verse in rng.sample(verses, len(questions))]
    asked: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    taken: dict[int, Tensor] = {}

    def tap(layer: int, module: Any) -> Any:
        base = base_attention(module, base_implementation(module))

        def attention(module, query, key, value, mask, **kwargs):
            taken[layer] = query
            return base(module, query, key, value, mask, **kwargs)

        return attention

    attentions = adapter.self_attentions
    uninstall = install({attentions[layer]: tap(layer, attentions[layer]) for layer in LAYERS})
    for prompt in prompts[::2]:
        words = tokenizer(prompt + frame.after, add_special_tokens=False)["input_ids"]
        inputs = torch.tensor([frame.header + words])
        with torch.inference_mode():
            adapter.decoder(input_ids=inputs, use_cache=False)
        positions = torch.arange(inputs.shape[1])[None]
        for layer, query in taken.items():
            plain = unrotate(query, *adapter.rotary(query, positions))
            turned = rotate(plain, *adapter.rotary(plain, torch.full_like(positions, DISTANCE))).float()
            scaled = turned[0, :, len(frame.header) :] * adapter.head_dim**-0.5  # [H, T, c]
            asked[layer].append(scaled.reshape(adapter.num_kv_heads, -1, adapter.head_dim))
    uninstall()
    return {layer: some(torch.cat(asked[layer], 1)) for layer in LAYERS}


def some_windows(count: int) -> tuple[Any, Tensor, int]:
    """The model in bfloat16, inputs [count, tokens] as a store reads them, and how many tokens it keeps of those."""
    tokenizer = AutoTokenizer.from_pretrained(assets.smollm2())
    model = AutoModelForCausalLM.from_pretrained(assets.smollm2(), dtype=torch.bfloat16).eval()
    ids = torch.tensor(tokenizer(assets.book_text("Genesis")[0])["input_ids"][: count * 1024]).view(count, -1)
    header = torch.tensor(chat_frame(tokenizer).header).expand(count, -1)
    return model, torch.cat((header, ids), 1), count * 512


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
