"""An encoder-decoder reads a stored document exactly as if it had just encoded it.

What holds for every family is in tests/test_family_matrix.py; here is the rest, for families that differ in it.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore.hooks import base_attention
from memstore.registry import adapter_for
from memstore.windows import plan
from tests.models import build, set_attention, tokens

EXACT = 1e-4
SHAPES = [
    "bart",
    "t5",
    "t5gemma",
]  # of attention: plain, with a position bias, of grouped heads with soft-capped scores
ENCODERS = ["bart", "t5", "pegasus_x", "longt5", "bigbird_pegasus"]  # that see all of a window, or parts of it


@pytest.fixture
def model(request):
    return build(request.param)


def of(*families):
    return pytest.mark.parametrize("model", families, indirect=True)


def states(model, ids):
    with torch.no_grad():
        return model.get_encoder()(input_ids=ids[None]).last_hidden_state


def logits(model, encoder_outputs, decoder_ids):
    with torch.no_grad():
        return model(encoder_outputs=encoder_outputs, decoder_input_ids=decoder_ids).logits


@of("bart", "t5")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_either_attention_gives_the_plain_models_logits(model, library, implementation):
    document, answer = tokens(60), tokens(7, seed=1, rows=1)
    set_attention(model, implementation)
    expected = logits(model, BaseModelOutput(last_hidden_state=states(model, document)), answer)
    memory = library.encode(model, input_ids=document, name="doc")
    with memstore.attach(model, memory, top_k="all") as attached:
        read = logits(model, attached.empty_prompt(), answer)
    assert (read - expected).abs().max() < EXACT
    assert model.config._attn_implementation == implementation


@of("bart", "t5")
def test_an_empty_prompt_can_be_given_by_hand(model, library):
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    plain = BaseModelOutput(last_hidden_state=states(model, tokens(60)))
    expected = model.generate(encoder_outputs=plain, **settings)
    with memstore.attach(model, library.encode(model, input_ids=tokens(60), name="doc"), top_k="all") as attached:
        assert torch.equal(model.generate(encoder_outputs=attached.empty_prompt(), **settings), expected)


@of(*ENCODERS)
def test_a_document_of_five_windows_reads_like_its_kept_states(model, library):
    window = 32
    document = tokens(32 + 4 * 16 - 5)
    memory = library.encode(model, input_ids=document, name="doc", window=window)
    pieces = plan(len(document), memory.manifest.rule)
    assert len(pieces) == 5
    pieces_kept = [
        states(model, document[w.start : w.stop])[:, w.keep_start - w.start : w.keep_stop - w.start] for w in pieces
    ]
    kept = torch.cat(pieces_kept, dim=1)
    assert kept.shape[1] == len(document)
    answer = tokens(7, seed=1, rows=1)
    expected = logits(model, BaseModelOutput(last_hidden_state=kept), answer)
    with memstore.attach(model, memory, top_k="all") as attached:
        assert (logits(model, attached.empty_prompt(), answer) - expected).abs().max() < EXACT
    with memstore.attach(model, memory, top_k=len(document)) as attached:
        assert (logits(model, attached.empty_prompt(), answer) - expected).abs().max() < EXACT


@of(*SHAPES)
def test_rows_with_their_own_memories(model, library):
    """Each row reads its own documents, prompts of unequal length included."""
    one, two, three = (library.encode(model, input_ids=tokens(30 + i, seed=i), name=str(i)) for i in range(3))
    answer = tokens(7, seed=1, rows=2)
    prompts = tokens(12, seed=9, rows=2)
    mask = torch.ones_like(prompts)
    mask[0, 8:] = 0
    alone = []
    for row, memories, length in ((0, [one], 8), (1, [two, three], 12)):
        with memstore.attach(model, *memories, top_k="all"), torch.no_grad():
            read = model(input_ids=prompts[row : row + 1, :length], decoder_input_ids=answer[row : row + 1])
            alone.append(read.logits)
    with memstore.attach(model, rows=[[one], [two, three]], top_k="all"), torch.no_grad():
        together = model(input_ids=prompts, attention_mask=mask, decoder_input_ids=answer).logits
    assert (together - torch.cat(alone)).abs().max() < EXACT


@pytest.mark.parametrize("top_k", ["all", 24])
def test_rows_that_share_memories_in_any_order(library, top_k):
    """Each memory is passed over once for all rows, and each row gets what it would get alone."""
    model = build("bart")
    one, two, three = (library.encode(model, input_ids=tokens(30 + i, seed=i), name=str(i)) for i in range(3))
    rows = [[one, two], [three], [two, one], [library["0"], library["1"]], [two, three, one]]
    answer = tokens(4, seed=1, rows=2 * len(rows))  # two beams a row
    alone = []
    for i, row in enumerate(rows):
        with memstore.attach(model, *row, top_k=top_k) as attached:
            alone.append(logits(model, attached.empty_prompt(2), answer[2 * i : 2 * i + 2]))
    with memstore.attach(model, rows=rows, top_k=top_k) as attached:
        together = logits(model, attached.empty_prompt(len(answer)), answer)
    assert (together - torch.cat(alone)).abs().max() < EXACT


def keep_best(model, k):
    """Let every cross-attention of the plain model see only the k best keys of each head and query."""
    crossing = {attention.module for attention in adapter_for(model)(model).cross_attentions()}

    def attention(module, query, key, value, mask, scaling=None, softcap=None, **rest):
        if module not in crossing:
            return base_attention(module, "eager")(
                module, query, key, value, mask, scaling=scaling, softcap=softcap, **rest
            )
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        least = scores.topk(k).values[..., -1:]
        weights = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("best", attention)
    AttentionMaskInterface.register("best", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    set_attention(model, "best")


@of(*SHAPES)
@pytest.mark.parametrize("k", [1, 7, 59])
def test_top_k_reads_the_best_rows_of_each_head(model, library, k):
    document, answer = tokens(60), tokens(7, seed=1, rows=1)
    set_attention(model, "eager")
    memory = library.encode(model, input_ids=document, name="doc")
    with memstore.attach(model, memory, top_k=k) as attached:
        read = logits(model, attached.empty_prompt(), answer)
    plain = BaseModelOutput(last_hidden_state=states(model, document))
    assert (read - logits(model, plain, answer)).abs().max() > EXACT
    keep_best(model, k)
    assert (read - logits(model, plain, answer)).abs().max() < EXACT


@of(*SHAPES)
def test_half_precision_memory_stays_close(model, library):
    document, answer = tokens(60), tokens(7, seed=1, rows=1)
    expected = logits(model, BaseModelOutput(last_hidden_state=states(model, document)), answer)
    memory = library.encode(model, input_ids=document, name="doc", dtype="bfloat16")
    with memstore.attach(model, memory, top_k="all") as attached:
        error = (logits(model, attached.empty_prompt(), answer) - expected).abs().max()
    assert 0 < error < 0.05 * expected.abs().max()


@of(*SHAPES)
def test_provenance_adds_up_to_the_attention_used(model, library):
    memories = [library.encode(model, input_ids=tokens(60, seed=i), name=f"doc{i}") for i in range(2)]
    for top_k in ("all", 20):
        with memstore.attach(model, *memories, top_k=top_k, explain=True) as attached:
            attached.generate(max_new_tokens=4, min_new_tokens=4, do_sample=False)
            readings = attached.provenance()
        steps, layers = {r.step for r in readings}, {r.layer for r in readings}
        assert steps == {0, 1, 2, 3} and layers == set(range(len(adapter_for(model)(model).cross_attentions())))
        for step in steps:
            for layer in layers:
                mass = sum(r.mass for r in readings if (r.step, r.layer) == (step, layer))
                assert mass == pytest.approx(1, abs=1e-4)  # no prompt: the memory has all of it
