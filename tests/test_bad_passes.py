"""Passes and selectors that do not fit: an error that says so, or what the plain model does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import memstore
from memstore.errors import AttachError
from memstore.reading.selectors import BlockSelector
from tests.models import clone, tokens
from tests.talks import BUDGET, document, greedy, remember, shallow

PROMPT = tokens(9, seed=5, rows=1)

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": PROMPT[:, :0]}, r"input_ids has shape \[1, 0\]"),
    "no rows": ({"input_ids": PROMPT[:0]}, r"\[0, 9\]"),
    "nothing": ({}, "is a NoneType"),
    "one dimension": ({"input_ids": PROMPT[0]}, r"shape \[9\]"),
    "a flat embedding": ({"inputs_embeds": torch.zeros(9, 48)}, r"\[9, 48\]"),
    "positions of others": ({"input_ids": PROMPT, "position_ids": torch.arange(7)[None]}, r"position_ids .*\[1, 7\]"),
    "a mask of three dimensions": ({"input_ids": PROMPT, "attention_mask": torch.ones(1, 9, 9)}, r"\[1, 9, 9\]"),
    "a short mask": ({"input_ids": PROMPT, "attention_mask": torch.ones(1, 7)}, r"\[1, 7\]; due is a tensor \[1, 9\]"),
    "a mask of fewer rows": (
        {"input_ids": PROMPT.repeat(2, 1), "attention_mask": torch.ones(1, 9)},
        r"\[1, 9\]; due is a tensor \[2, 9\]",
    ),
    "a list": ({"input_ids": PROMPT, "attention_mask": [[1] * 9]}, "attention_mask is a list"),
}


@pytest.fixture(scope="module")
def model():
    return shallow(layers=2)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_pass_that_does_not_fit(library, model, case, windows):
    keywords, problem = WRONG[case]
    memory = remember(library, model, document()) if windows else library.encode(model, input_ids=tokens(60), name="a")
    with memstore.attach(model, memory, budget=BUDGET), pytest.raises(AttachError, match=problem):
        model(**keywords)


def test_a_mask_says_what_it_says_to_the_plain_model(library, model):
    """Any number but 0 is a token, and what stands behind the last token of the pass is of no matter."""
    text, ids = tokens(60), torch.nn.functional.pad(PROMPT, (3, 0))
    memory = library.encode(model, input_ids=text, name="doc")
    with torch.no_grad():
        expected = model(input_ids=torch.cat((text[None], PROMPT), dim=1)).logits[:, 60:]
        with memstore.attach(model, memory):
            for mask in ((ids != 0) * 2, (ids != 0).float(), torch.nn.functional.pad(ids, (0, 4), value=1) != 0):
                assert (model(input_ids=ids, attention_mask=mask).logits[:, 3:] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("way", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_beams_of_one_prompt_are_not_taken_for_rows_by_the_models_own_generate(library, model, way):
    rows = [[remember(library, model, document(seed), name)] for seed, name in enumerate("ab")]
    with memstore.attach(model, rows=rows, budget=BUDGET):
        for given in ({"input_ids": PROMPT}, {}):
            with pytest.raises(AttachError, match="batch of 1"):
                model.generate(**given, **greedy(2) | way)
        assert len(model.generate(input_ids=PROMPT.repeat(2, 1), **greedy(2) | way)) >= 2


@pytest.mark.parametrize("before", [False, True])
def test_a_layer_that_another_model_runs_reads_no_memory(library, model, before):
    """Neither what is attached to the first, nor what was read for its last prompt; a gradient may run one again."""
    other = tf.LlamaForCausalLM(model.config).eval()
    other.model.layers, own = model.model.layers, clone(model)
    memory = remember(library, model, document())
    with memstore.attach(model, memory, budget=BUDGET), torch.no_grad():
        if before:
            model(input_ids=PROMPT)
        with pytest.raises(AttachError, match="outside of LlamaModel"):
            other(input_ids=PROMPT)
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            own.gradient_checkpointing_enable()
        own.train().zero_grad()
        with memstore.attach(own, memory, budget=BUDGET):
            own(input_ids=PROMPT, labels=PROMPT, use_cache=False).loss.backward()
        gradients.append(own.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients)


SCORES = {
    "negative": (lambda good: -good, "at least 0"),
    "infinite": (lambda good: good.index_fill(1, torch.tensor([3]), torch.inf), "to inf"),
    "truth values": (lambda good: good > 0, "torch.bool"),
    "complex": (lambda good: good.to(torch.complex64), "complex64"),
    "sparse": (lambda good: good.to_sparse(), "sparse_coo"),
    "nowhere": (lambda good: good.to("meta"), "on meta"),
}


@pytest.mark.parametrize("case", SCORES)
def test_scores_that_are_no_numbers_of_at_least_0(library, model, case):
    answer, problem = SCORES[case]

    class Answering(BlockSelector):
        def score(self, question):
            return answer(torch.ones(len(question.asks), question.num_blocks))

    memory = remember(library, model, document())
    with memstore.attach(model, memory, budget=BUDGET, selector=Answering()), pytest.raises(AttachError, match=problem):
        model(input_ids=PROMPT)
