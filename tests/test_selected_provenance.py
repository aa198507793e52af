"""What was read of chosen spans, held against the plain model's attention to the same keys in an ordinary cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import memstore
from memstore.errors import AttachError
from memstore.memory import Memory
from memstore.reading import joint
from memstore.reading.chat import chat_frame
from memstore.reading.selection import BLOCK, Span, choose_spans, num_blocks, span_width
from memstore.reading.selectors import BlockSelector, Question
from tests import tiny
from tests.models import build, set_attention, tokens

EXACT = 1e-5
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
BUDGET = 6  # blocks, in spans of four and of two


@pytest.fixture(params=[1, 1 << 30], ids=["by one kernel", "merged"], autouse=True)
def fused_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel: Mock) -> Iterator[None]:
    """What comes before the noted positions is read either way."""
    monkeypatch.setattr(joint, "FUSED_FROM", request.param)
    yield
    assert kernel.called == (request.param == 1)


class Fixed(BlockSelector):
    """Scores that look at nothing, other ones for every row, and if asked for every layer."""

    needs_queries = False

    def __init__(self, layers: int | None = None) -> None:
        self.layers = layers
        self.given: list[torch.Tensor] = []  # [1 or layers, blocks] for each row, in the order of the batch

    def score(self, question: Question) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.given))
        rows = len(question.asks)
        scores = torch.rand(self.layers or 1, rows, question.num_blocks, generator=generator)
        self.given += scores.unbind(1)
        return scores if self.layers else scores[0]


def spans_of(memories: Sequence[Memory], scores: torch.Tensor) -> list[Span]:
    return choose_spans(scores, [memory.num_tokens for memory in memories], BUDGET, span_width(scores, BUDGET))


def weights_of(model: Any, memories: Sequence[Memory], by_layer: Sequence[list[Span]], own: torch.Tensor, sink: int):
    """The plain model's attention [L, H, T, sink + spans + T], float64, of its own tokens [T] behind a cache that holds
    the sink and the spans of every layer, with their keys rotated to where they are to stand."""
    cache, room = DynamicCache(), sink + BUDGET * BLOCK
    for layer, spans in enumerate(by_layer):
        size = sum(span.stop - span.start for span in spans)
        positions = torch.tensor([*range(sink), *range(room - size, room)])[None]
        parts = []
        for part in ("keys", "values"):
            with memories[0].open() as first:
                pieces = [first.prefix(f"{part}.{layer}")[:sink].clone()]
            for span in spans:
                with memories[span.memory].open() as opened:
                    pieces.append(opened.rows(f"{part}.{layer}", span.start, span.stop).clone())
            parts.append(torch.cat(pieces).transpose(0, 1)[None])
        cos, sin = model.model.rotary_emb(parts[0], positions)
        cache.update(apply_rotary_pos_emb(parts[0], parts[0], cos, sin)[1], parts[1], layer)
    with torch.no_grad():
        output = model(
            input_ids=own[None],
            position_ids=torch.arange(room, room + len(own))[None],
            output_attentions=True,
            **{CACHE: cache},
        )
    return torch.stack(output.attentions)[:, 0].double()


def check_masses(readings, weights, memories, by_layer, sink, last):
    """Every mass of a row's readings, and that none is missing, where ``last`` is the own token of step 0."""
    expected = {}
    for layer, spans in enumerate(by_layer):
        at = sink
        for span in spans:
            for start in range(span.start, span.stop, BLOCK):
                stop = min(start + BLOCK, span.stop)
                held = weights[layer, :, last:, at : at + stop - start].sum(-1)  # [H, steps]
                at += stop - start
                for head, of_head in enumerate(held.tolist()):
                    for step, mass in enumerate(of_head):
                        expected[step, layer, head, memories[span.memory].name, start, stop] = mass
    found = {(r.step, r.layer, r.head, r.document, r.start_token, r.end_token): r.mass for r in readings}
    assert found.keys() == expected.keys() and len(found) == len(readings)
    for key, mass in found.items():
        assert mass == pytest.approx(expected[key], abs=EXACT)


@pytest.mark.parametrize("per_layer", [False, True], ids=["one-excerpt", "excerpt-per-layer"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_head_of_every_layer_gave_the_chosen_spans_what_the_plain_model_gives(library, family, per_layer):
    """Two documents, whose last blocks are short unless layers differ: an ordinary cache is equally long in all."""
    model = build(family)
    set_attention(model, "eager")
    lengths = (BLOCK * 5, BLOCK * 4) if per_layer else (BLOCK * 4 + 17, BLOCK * 3 + 40)
    memories = [library.encode(model, input_ids=tokens(n, seed=n), name=str(n), window=BLOCK) for n in lengths]
    selector = Fixed(3 if per_layer else None)
    prompt = tokens(9, seed=1, rows=1)
    with memstore.attach(model, *memories, selector=selector, budget=BUDGET * BLOCK, explain=True) as attached:
        written = attached.generate(input_ids=prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        found, documents = attached.provenance("each"), attached.provenance().documents()
        with pytest.raises(AttachError, match="scores nothing else"):
            found.retrieved()
    by_layer = [spans_of(memories, scores) for scores in selector.given[0]] * (1 if per_layer else 3)
    assert per_layer == (len({tuple(spans) for spans in by_layer}) > 1)
    assert per_layer or any(span.stop % BLOCK for span in by_layer[0])
    weights = weights_of(model, memories, by_layer, written[0, :-1], 0)
    check_masses(found, weights, memories, by_layer, 0, last=8)
    own = weights[:, :, 8:, -written.shape[1] + 1 :].sum(-1).mean()
    assert sum(d.share for d in documents) == pytest.approx(1 - float(own), abs=EXACT)


def test_padded_chats_with_rows_of_their_own_memories(library):
    """The sink, which the template's header becomes, is no passage; nor is padding."""
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    set_attention(model, "eager")
    memories = [
        library.encode(
            model, tokenizer, ("In the beginning was the word. " * 20)[: 320 + 64 * i], name=str(i), window=256
        )
        for i in range(3)  # of whole blocks: an ordinary cache is equally long in all layers
    ]
    rows = [[memories[0], memories[1]], [memories[2]]]
    sink, frame = len(memories[0].manifest.prefix_ids), chat_frame(tokenizer)
    tails = [
        tokenizer(question + frame.after, add_special_tokens=False)["input_ids"]
        for question in ("Who was it?", "What was there in the beginning?")
    ]
    longest = max(map(len, tails))
    ids = torch.tensor([[257] * (longest - len(tail)) + frame.header + tail for tail in tails])
    mask = torch.tensor([[0] * (longest - len(tail)) + [1] * (sink + len(tail)) for tail in tails])
    selector = Fixed(2)
    with memstore.attach(model, rows=rows, selector=selector, budget=BUDGET * BLOCK, explain=True) as attached:
        written = attached.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False
        )
        found = attached.provenance("each")
    assert sink == len(frame.header) > 0
    for row, of_row in enumerate(rows):
        by_layer = [spans_of(of_row, scores) for scores in selector.given[row]]
        own = written[row, longest - len(tails[row]) + sink : -1]
        weights = weights_of(model, of_row, by_layer, own, sink)
        readings = [r for r in found if r.row == row]
        check_masses(readings, weights, of_row, by_layer, sink, last=len(tails[row]) - 1)
        assert all(r.token == written[row, longest + sink + r.step] for r in readings)


@pytest.mark.parametrize("per_layer", [False, True], ids=["one-excerpt", "excerpt-per-layer"])
def test_the_selection_is_that_of_the_scores(library, per_layer):
    """By row, in reading order, with each block's own score; beams are rows."""
    model = build("llama")
    lengths = (BLOCK * 5 + 17, BLOCK * 4 + 40)
    memories = [library.encode(model, input_ids=tokens(n, seed=n), name=str(n), window=BLOCK) for n in lengths]
    selector, prompts = Fixed(3 if per_layer else None), tokens(9, seed=1, rows=2)
    with memstore.attach(model, *memories, selector=selector, budget=BUDGET * BLOCK) as attached:
        attached.generate(input_ids=prompts, max_new_tokens=2, num_beams=2, do_sample=False)
        chosen = attached.selection()
    first = num_blocks(lengths[0])
    expected = [
        [
            (memories[span.memory].name, start, min(start + BLOCK, span.stop), layer if per_layer else None, score)
            for layer, scores in enumerate(of_row)
            for span in spans_of(memories, scores)
            for start in range(span.start, span.stop, BLOCK)
            for score in [float(scores[first * span.memory + start // BLOCK])]
        ]
        for of_row in selector.given
    ]
    found = [[(c.document, c.start_token, c.end_token, c.layer, c.score) for c in row] for row in chosen]
    assert found[0] == found[1] and found[2] == found[3] and found[::2] == expected and found[0] != found[2]
    with pytest.raises(AttachError, match="attached"):
        attached.selection()


def test_nothing_is_chosen_of_what_is_read_whole(library):
    model = build("llama")
    short, long = (library.encode(model, input_ids=tokens(n), name=str(n), window=BLOCK) for n in (60, 500))
    with memstore.attach(model, rows=[[short], [long]], budget=BLOCK) as attached, torch.no_grad():
        model(input_ids=tokens(9, seed=1, rows=2))
        whole, chosen = attached.selection()
    assert whole == [] and [c.document for c in chosen] == ["500"]
    bart = build("bart")
    memory = library.encode(bart, input_ids=tokens(60), name="hidden")
    with memstore.attach(bart, memory) as attached, pytest.raises(AttachError, match="provenance"):
        attached.selection()
