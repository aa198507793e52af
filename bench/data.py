"""What the index benchmark searches: keys of a memory, and queries that a decoder really asks of them.

    python bench/data.py        makes and caches everything (15 minutes on two cores with AMX)

- ``smollm2/L.G``: SmolLM2-135M-Instruct over the whole King James Bible, read as ``store.encode`` reads it (windows of
  1,024 tokens behind the chat header, overlapping by one half, in bfloat16): the keys of layer L and key-value head G,
  before rotation, one per token. Queries: that layer's three query heads over G at every token of a user's words and of
  the generation prompt, turned to the fixed distance at which scouting asks, and divided by the root of the head's
  width. The prompts are questions about the Bible, and verses to be explained, through the chat template.
- ``whisper/L``: encoder states of Whisper tiny.en, 1,500 for each window of 30 seconds. There is no speech at hand, so
  each window is a scene of beeps, sweeps, knocks and noises that no other window repeats. Queries: those of all heads
  of decoder layer L while it writes what it hears in some of the windows, absorbed into the space of the states.
- ``mixed/D``: synthetic, d = D. Keys: a common mean, and a mixture of 1,000 clusters of unequal size. Queries: other
  points of the same mixture, sent through a random linear map and so away from the keys, with some of the key they
  came from left in: decoder queries are no keys, and yet find some.

No vector is ever repeated to reach a size: a smaller n is the first n keys.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstore import assets
from memstore.assets import build_once, cache_dir

sys.path.append(str(Path(__file__).parents[1]))  # where tests/real can read Whisper's weights

LAYERS = (4, 14)  # of SmolLM2's 30; more only cost time
READ_AT_ONCE = 8  # windows
QUERIES = 1024  # kept for each dataset to measure with, and as many of other prompts to train or tune with
SEED = 3

RATE = 16_000  # samples a second
SCENES = 68  # of 1,500 states each

SIZES = {512: 1_000_000, 768: 200_000}  # keys of each synthetic width
FOUND = 0.3  # how much of a synthetic query is the point that it asks for
SHARPNESS = 4.0  # standard deviation of its scores: the best 256 of 200,000 hold most of the attention

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


class Vectors(NamedTuple):
    """One benchmark's vectors: keys [n, G, d] of which head G is searched, and queries [m, d], float32.

    Queries are scaled: the softmax of their scores is the attention over the memory. ``tuning`` are as many of other
    prompts, to train or tune with. A store keeps such keys in blocks of ``block_rows``.
    """

    name: str
    keys: Tensor
    head: int
    queries: Tensor
    tuning: Tensor
    block_rows: int


def load(name: str, n: int) -> Vectors:
    """The first n keys, or all if there are fewer, of ``smollm2/L.G``, ``whisper/L`` or ``mixed/D``."""
    kind, _, which = name.partition("/")
    folder = {"smollm2": smollm2, "whisper": whisper, "mixed": mixed}[kind](which)
    keys, queries, tuning = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("keys", "queries", "tuning"))
    head, block_rows = 0, 16384
    if kind == "smollm2":
        head, block_rows = int(which.split(".")[1]), 2048  # as all layers of a token go into one block
        keys, queries, tuning = keys.transpose(1, 0, 2), queries[head], tuning[head]
    elif kind == "whisper":
        keys, queries, tuning = keys[:, None], queries[int(which)], tuning[int(which)]
    else:
        keys = keys[:, None]
    tensors = (torch.from_numpy(np.array(array, dtype=np.float32)) for array in (keys[:n], queries, tuning))
    keys, queries, tuning = tensors
    return Vectors(name, keys, head, queries, tuning, block_rows)


def encoding_cost(name: str, windows: int = 4) -> float | None:
    """CPU seconds of the whole model for each token that a memory keeps, in bfloat16 (SmolLM2) or float32 (Whisper)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperForConditionalGeneration

    from memstore.reading.chat import chat_frame
    from memstore.registry import adapter_for
    from tests.real.whisper import whisper_tiny_en

    if name.startswith("smollm2"):
        path = assets.smollm2()
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        text = assets.book_text("Genesis")[0]
        ids = torch.tensor(tokenizer(text)["input_ids"][: windows * 1024]).view(windows, -1)
        inputs, kept = torch.cat((torch.tensor([chat_frame(tokenizer).header] * windows), ids), 1), windows * 512
    elif name.startswith("whisper"):
        model = WhisperForConditionalGeneration.from_pretrained(whisper_tiny_en()).eval()
        inputs, kept = torch.randn(windows, 80, 3000), windows * 1500
    else:
        return None
    adapter = adapter_for(model)(model)
    with torch.inference_mode():
        adapter.encode(inputs)
        began = time.process_time()
        adapter.encode(inputs)
    return (time.process_time() - began) / kept


def smollm2(which: str) -> Path:
    """A folder with keys [G, n, c] float16, queries and tuning [G, m, c] float32 of one layer."""
    folder = build_once(cache_dir() / "bench" / "smollm2-bible", _read_the_bible)
    return folder / which.split(".")[0]


def _read_the_bible(target: Path, report: Callable[..., Any] = print) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from memstore.registry import adapter_for
    from memstore.windows import plan

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
    asked = _ask_smollm2(model, adapter, tokenizer)
    for layer in LAYERS:
        keys[layer].flush()
        for part, queries in zip(("queries", "tuning"), asked[layer], strict=True):
            np.save(target / str(layer) / f"{part}.npy", queries)


def _ask_smollm2(model: Any, adapter: Any, tokenizer: Any) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each layer two sets of queries [G, QUERIES, c], from the even and from the odd prompts."""
    from memstore.hooks import base_attention, base_implementation, install
    from memstore.reading.chat import chat_frame
    from memstore.reading.rotary import rotate, unrotate
    from memstore.reading.scouting import DISTANCE

    frame = chat_frame(tokenizer)
    rng = random.Random(SEED)
    verses = [verse.text for verses in assets.bible().values() for verse in verses]
    questions = [question.strip() for question in " ".join(QUESTIONS.split()).split(";")]
    prompts = questions + [f"Explain this verse: {verse}" for verse in rng.sample(verses, len(questions))]
    asked: dict[int, list[list[Tensor]]] = {layer: [[], []] for layer in LAYERS}
    taken: dict[int, Tensor] = {}

    def tap(layer: int, module: Any) -> Any:
        base = base_attention(module, base_implementation(module))

        def attention(module, query, key, value, mask, **kwargs):
            taken[layer] = query
            return base(module, query, key, value, mask, **kwargs)

        return attention

    attentions = adapter.self_attentions
    uninstall = install({attentions[layer]: tap(layer, attentions[layer]) for layer in LAYERS})
    for i, prompt in enumerate(prompts):
        words = tokenizer(prompt + frame.after, add_special_tokens=False)["input_ids"]
        inputs = torch.tensor([frame.header + words])
        with torch.inference_mode():
            adapter.decoder(input_ids=inputs, use_cache=False)
        positions = torch.arange(inputs.shape[1])[None]
        for layer, query in taken.items():
            plain = unrotate(query, *adapter.rotary(query, positions))
            turned = rotate(plain, *adapter.rotary(plain, torch.full_like(positions, DISTANCE))).float()
            scaled = turned[0, :, len(frame.header) :] * adapter.head_dim**-0.5  # [H, T, c]
            asked[layer][i % 2].append(scaled.reshape(adapter.num_kv_heads, -1, adapter.head_dim))
    uninstall()
    return {layer: tuple(_sample(torch.cat(each, 1)) for each in asked[layer]) for layer in LAYERS}


def whisper(which: str) -> Path:
    """A folder with keys [n, d], and queries and tuning [layers, m, d], float32. The layer is chosen by the caller."""
    return build_once(cache_dir() / "bench" / "whisper-sounds", _listen)


@torch.no_grad()
def _listen(target: Path) -> None:
    from transformers import AutoFeatureExtractor, WhisperForConditionalGeneration

    from memstore.attention import absorb_keys, split_heads
    from memstore.hooks import base_attention, base_implementation, install
    from memstore.registry import adapter_for
    from tests.real.whisper import whisper_tiny_en

    path = whisper_tiny_en()
    model = WhisperForConditionalGeneration.from_pretrained(path).eval()
    extract = AutoFeatureExtractor.from_pretrained(path)
    adapter = adapter_for(model)(model)
    rng = np.random.default_rng(SEED)
    sounds = [scene(rng, 30 * RATE) for _ in range(SCENES)]
    cross = adapter.cross_attentions()
    asked: list[list[list[Tensor]]] = [[[], []] for _ in cross]
    taken: dict[int, Tensor] = {}

    def tap(layer: int, module: Any) -> Any:
        base = base_attention(module, base_implementation(module))

        def attention(module, query, key, value, mask, **kwargs):
            taken[layer] = query * kwargs.get("scaling", query.shape[-1] ** -0.5)
            return base(module, query, key, value, mask, **kwargs)

        return attention

    states = []
    uninstall = install({each.module: tap(each.layer_idx, each.module) for each in cross})
    for i, sound in enumerate(sounds):
        features = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
        encoded = model.get_encoder()(features)
        written = model.generate(features, do_sample=False, max_length=28)
        model(encoder_outputs=encoded, decoder_input_ids=written)
        states.append(encoded.last_hidden_state[0])
        for each in cross:
            absorbed = absorb_keys(taken[each.layer_idx], split_heads(each.key.weight, each.num_heads))
            asked[each.layer_idx][i % 2].append(absorbed[0].flatten(0, 1))
    uninstall()
    np.save(target / "keys.npy", torch.cat(states).numpy())
    for i, part in enumerate(("queries", "tuning")):
        np.save(target / f"{part}.npy", np.stack([_sample(torch.cat(layer[i])) for layer in asked]))


def scene(rng: np.random.Generator, samples: int) -> np.ndarray:
    """One window of sound [samples] float32: a floor of noise, and events at random times, each of a random kind."""
    sound = rng.uniform(0.001, 0.01) * rng.standard_normal(samples)
    for _ in range(rng.integers(10, 40)):
        length = int(rng.uniform(0.05, 3) * RATE)
        at = rng.integers(0, samples - length)
        time, pitch = np.arange(length) / RATE, np.exp(rng.uniform(np.log(60), np.log(4000)))
        vibrato = rng.uniform(0, 8) * np.sin(2 * np.pi * rng.uniform(1, 8) * time)
        sweep = rng.uniform(-0.5, 1) * pitch * time
        phase = 2 * np.pi * (pitch + sweep / 2) * time + vibrato
        kinds = (
            np.sin(phase),  # a tone
            sum(np.sin(phase * i) / i for i in range(1, rng.integers(3, 12))),  # a voice without words
            np.sign(np.sin(phase)) * (time * rng.uniform(2, 20) % 1 < 0.3),  # beeps
            np.cumsum(rng.standard_normal(length)) / np.sqrt(length),  # a rumble
            rng.standard_normal(length) * (time * rng.uniform(1, 10) % 1 < 0.1),  # knocks
        )
        event = kinds[rng.integers(len(kinds))] * np.hanning(length)
        sound[at : at + length] += np.exp(rng.uniform(np.log(0.02), np.log(0.5))) * event
    return np.clip(sound, -1, 1).astype(np.float32)


def mixed(which: str) -> Path:
    """A folder with keys [n, d] float16, queries and tuning [m, d] float32."""
    return build_once(cache_dir() / "bench" / f"mixed-{which}", lambda target: _mix(int(which), target))


def _mix(width: int, target: Path) -> None:
    generator = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.arange(1, width + 1).float() ** -0.5  # a few directions hold most of the variance, as in a model
    basis = torch.linalg.qr(normal(width, width)).Q * spread
    mean, centres = 2 * normal(width) * spread.norm() / width**0.5, normal(1000, width)
    sizes = torch.rand(1000, generator=generator) ** 2  # some places are crowded
    turn = torch.linalg.qr(normal(width, width)).Q

    def points(count: int) -> Tensor:
        cluster = torch.multinomial(sizes, count, replacement=True, generator=generator)
        return (0.7 * centres[cluster] + 0.7 * normal(count, width)) @ basis.T

    rows = SIZES[width]
    keys = np.lib.format.open_memmap(target / "keys.npy", "w+", np.float16, (rows, width))
    for start in range(0, rows, 50_000):
        keys[start : start + 50_000] = (mean + points(min(50_000, rows - start))).half().numpy()
    keys.flush()
    for part in ("queries", "tuning"):
        asks = points(QUERIES)
        asks = FOUND * asks + (1 - FOUND) * asks @ turn + mean @ turn
        scores = asks @ torch.from_numpy(keys[:: rows // 10_000]).float().T
        np.save(target / f"{part}.npy", (asks * SHARPNESS / scores.std(1, keepdim=True)).numpy())


def _sample(queries: Tensor) -> np.ndarray:
    """QUERIES of queries [..., m, c] at random."""
    chosen = torch.randperm(queries.shape[-2], generator=torch.Generator().manual_seed(SEED))[:QUERIES]
    assert len(chosen) == QUERIES, f"only {queries.shape[-2]} queries"
    return queries[..., chosen, :].numpy()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for make, which in ((smollm2, "4.0"), (whisper, "2"), *((mixed, str(width)) for width in SIZES)):
        print(make(which), flush=True)


if __name__ == "__main__":
    main()
