"""The matrix of decoder-only families: each cell of docs/families.md, held against the plain model."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from itertools import combinations
from typing import Any

import pytest
import torch

import memstore
from memstore import attention, registry
from memstore.errors import AttachError, DocumentError
from memstore.reading import joint
from tests.decoders import COLUMNS, DECODERS, NATIVE
from tests.models import build, randomised, tokens

EXACT = 1e-4
TELLING = 30 * EXACT
DOCUMENT, PROMPT = tokens(60), tokens(9, seed=1, rows=1)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def known_plugins(monkeypatch):
    """What is installed is looked up once for all cells: else that would take half of their time."""
    monkeypatch.setattr(registry, "entry_points", installed)


installed = cache(entry_points)


@cache
def built(family):
    """A tiny model to read with, and the same model to compare it with; made once for all cells of a family."""
    return build(family), build(family)


class Reading:
    """A tiny model and its store, and the same model without either."""

    def __init__(self, family, library):
        self.family, self.library = DECODERS[family], library
        self.model, self.bare = built(family)
        for model in built(family):
            model.set_attn_implementation(self.family.attention[0])

    def read(self, document, name="doc", **rule):
        return self.library.encode(self.model, input_ids=document, name=name, **rule)

    def attach(self, *memories, **options):
        return memstore.attach(self.model, *memories, **options)


def logits(model, prompt, **inputs):
    with torch.no_grad():
        return model(input_ids=prompt, **inputs).logits


def after(bare, document, prompt):
    """What the plain model gives for a prompt that stands behind a document."""
    return logits(bare, torch.cat((document[None], prompt), dim=1))[:, len(document) :]


def written(bare, document, prompt, **settings):
    joined = torch.cat((document[None], prompt), dim=1)
    return bare.generate(input_ids=joined, **GREEDY, **settings)[:, joined.shape[1] :]


def exact(reading):
    memory = reading.read(DOCUMENT)
    for implementation in reading.family.attention:
        for model in (reading.bare, reading.model):
            model.set_attn_implementation(implementation)
        with reading.attach(memory):
            read = logits(reading.model, PROMPT)
        assert (read - after(reading.bare, DOCUMENT, PROMPT)).abs().max() < EXACT
        assert (read - logits(reading.bare, PROMPT)).abs().max() > 100 * EXACT  # the memory does matter


def greedy(reading):
    with reading.attach(reading.read(DOCUMENT)) as attached:
        answer = attached.generate(input_ids=PROMPT, **GREEDY)
    assert torch.equal(answer[:, 9:], written(reading.bare, DOCUMENT, PROMPT))


def beams(reading):
    with reading.attach(reading.read(DOCUMENT)) as attached:
        answer = attached.generate(input_ids=PROMPT, num_beams=3, **GREEDY)
    assert torch.equal(answer[:, 9:], written(reading.bare, DOCUMENT, PROMPT, num_beams=3))


def left_padding(reading):
    prompts, pads = tokens(9, seed=1, rows=3), (0, 2, 5)
    mask = torch.ones_like(prompts)
    for row, pad in enumerate(pads):
        prompts[row, :pad], mask[row, :pad] = 0, 0
    with reading.attach(reading.read(DOCUMENT)):
        read = logits(reading.model, prompts, attention_mask=mask)
    for row, pad in enumerate(pads):
        expected = after(reading.bare, DOCUMENT, prompts[row : row + 1, pad:])
        assert (read[row, pad:] - expected[0]).abs().max() < EXACT


def rows_of_their_own(reading):
    documents, prompts = [tokens(20 + 25 * i, seed=i) for i in range(2)], tokens(9, seed=7, rows=2)
    memories = [reading.read(document, str(i)) for i, document in enumerate(documents)]
    with reading.attach(rows=[[memory] for memory in memories]):
        read = logits(reading.model, prompts)
    for row, document in enumerate(documents):
        expected = after(reading.bare, document, prompts[row : row + 1])
        assert (read[row] - expected[0]).abs().max() < EXACT


def chosen_spans(reading):
    """Two of three windows are chosen. Windows are as long as a block, so a choice is a document that can be written
    out, for a model whose windows are kept apart by its mask."""
    document = tokens(192)
    if reading.family.whole_only:
        with pytest.raises(DocumentError, match="its positions are learned and added to its tokens"):
            reading.read(document, window=64)
        memories = [reading.read(document[:20], "one"), reading.read(document[20:50], "two")]
        with pytest.raises(AttachError, match="one memory of one window at a time: its positions are learned"):
            reading.attach(*memories)
        return
    memory = reading.read(document, window=64, overlap=0)
    with reading.attach(memory, budget=128):
        read = logits(reading.model, PROMPT)
    windows, errors = document.split(64), []
    for chosen in combinations(range(3), 2):
        joined = torch.cat([*(windows[i] for i in chosen), PROMPT[0]])[None]
        expected = logits(reading.bare, joined, attention_mask=apart(reading.bare, joined.shape[1]))[:, 128:]
        errors.append(float((read - expected).abs().max()))
    assert min(errors) < EXACT
    assert max(errors) > TELLING


def apart(model, length):
    """Masks [1, 1, n, n] for every kind of layer, under which a window of 64 tokens sees nothing of the one before."""
    places = torch.arange(length)
    distance = places[:, None] - places
    same = (places[:, None] // 64 == places // 64) | (places[:, None] >= 128)
    config = model.config

    def mask(window):
        seen = (distance >= 0) & same & (distance < (window or length))
        return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]

    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None:
        return mask(window)
    return {"full_attention": mask(None), "sliding_attention": mask(window)}


CELLS = {
    check.__name__.replace("_", " "): check
    for check in (exact, greedy, beams, left_padding, rows_of_their_own, chosen_spans)
}


def test_every_column_has_its_test():
    assert list(CELLS) == list(COLUMNS)


def capped(family):
    """Whether scores are soft-capped, which no kernel does."""
    return getattr(built(family)[0].config, "attn_logit_softcapping", None) is not None


@pytest.mark.parametrize("fused_from", [1, 1 << 30], ids=["by one kernel", "merged"])
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("family", DECODERS)
def test_a_cell_of_the_matrix(library, family, column, fused_from, kernel, monkeypatch):
    monkeypatch.setattr(joint, "FUSED_FROM", fused_from)
    CELLS[column](Reading(family, library))
    refused = DECODERS[family].whole_only and column == "chosen spans"
    assert kernel.called == (fused_from == 1 and not capped(family) and not refused)


@pytest.mark.parametrize(("length", "calls"), [(31, 0), (32, 3)])
def test_from_32_positions_on_one_kernel_reads(library, length, calls, kernel):
    reading, prompt = Reading("llama", library), tokens(length, seed=1, rows=1)
    with reading.attach(reading.read(DOCUMENT)):
        read = logits(reading.model, prompt)
    assert kernel.call_count == calls  # one for each layer
    assert (read - after(reading.bare, DOCUMENT, prompt)).abs().max() < EXACT


@pytest.mark.parametrize("explain", [False, True], ids=["", "explained"])
@pytest.mark.parametrize("chunk", [1024, 13])
@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        (family, implementation)
        for family in ("llama", "mistral-sliding", "gemma2", "gemma3_text", "gpt2")
        for implementation in DECODERS[family].attention
    ],
)
def test_long_padded_prompts_in_chunks(library, family, implementation, chunk, explain, kernel, monkeypatch):
    """Where chunks, windows, padding, of two chunks and more, and what is told of the prompt's end meet each other."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    reading = Reading(family, library)
    for model in (reading.bare, reading.model):
        model.set_attn_implementation(implementation)
    documents, prompts, pads = [tokens(60, seed=3), tokens(90, seed=4)], tokens(70, seed=9, rows=2), (30, 0)
    memories = [reading.read(document, str(i)) for i, document in enumerate(documents)]
    mask = torch.ones_like(prompts)
    prompts[0, :30], mask[0, :30] = 0, 0
    with reading.attach(rows=[[memory] for memory in memories], explain=explain):
        read = logits(reading.model, prompts, attention_mask=mask)
    assert kernel.called != capped(family)
    for row, (document, pad) in enumerate(zip(documents, pads, strict=True)):
        expected = after(reading.bare, document, prompts[row : row + 1, pad:])
        assert (read[row, pad:] - expected[0]).abs().max() < EXACT


def test_positions_inside_the_window_are_read_by_one_kernel_though_later_ones_drop_tokens(library, kernel, monkeypatch):
    """Two rows of which one begins later: what both have inside the window, and merged, are the same."""
    reading, prompts = Reading("llama", library), tokens(NATIVE, seed=9, rows=2)
    memories = [reading.read(tokens(60 + 30 * i, seed=i), str(i)) for i in range(2)]
    read = []
    for fused_from in (32, 1 << 30):
        monkeypatch.setattr(joint, "FUSED_FROM", fused_from)
        with reading.attach(rows=[[memory] for memory in memories], when_full="drop"):
            read.append(logits(reading.model, prompts))
    assert [call.args[0].shape[2] for call in kernel.call_args_list] == 6 * [NATIVE - 90]  # two rows, three layers
    assert (read[0] - read[1]).abs().max() < EXACT


@pytest.mark.parametrize("length", [20, 60], ids=["merged", "by one kernel"])
def test_padding_that_sees_nothing_has_finite_gradients(library, length):
    """In a layer that reads no memory, and for a loss that looks at padding too."""
    model = build("llama")
    prompts = tokens(length, seed=9, rows=2)
    mask = torch.ones_like(prompts)
    prompts[0, :8], mask[0, :8] = 0, 0
    with memstore.attach(model, library.encode(model, input_ids=DOCUMENT, name="doc"), layers=[1], when_full="drop"):
        (100 * model(input_ids=prompts, attention_mask=mask).logits).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family, each in DECODERS.items() for change in each.telling],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_models_tell_wrong_readings_apart(family, change):
    """What distinguishes a family must be seen in the logits of its tiny model, or no test would prove anything."""
    model = build(family)
    other = randomised(lambda: DECODERS[family].make(**change))
    other.load_state_dict(model.state_dict())
    assert (after(model, DOCUMENT, PROMPT) - after(other, DOCUMENT, PROMPT)).abs().max() > TELLING
