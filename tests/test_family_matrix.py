"""The matrix of families: each cell of docs/families.md, held against the plain model."""

from __future__ import annotations

import copy

import pytest
import torch

import memstore
from tests.matrix import COLUMNS, FAMILIES
from tests.models import build, set_attention, tokens

EXACT = 1e-4
ANSWER = tokens(7, seed=1, rows=1)


class Reading:
    """A tiny model and its store, and the same model without either."""

    def __init__(self, family, library):
        self.family, self.library = FAMILIES[family], library
        self.model, self.bare = build(family), build(family)

    def document(self, name, length):
        return self.family.document(sum(map(ord, name)), length)

    def read(self, *documents):
        """Memories of documents, given by name and length."""
        return [self.library.encode(self.model, name=name, **self.document(name, length)) for name, length in documents]

    def states(self, *documents):
        """What a plain encoder makes of these documents, one after the other. Some encoders change as they read."""
        with torch.no_grad():
            inputs = [self.family.inputs(self.document(name, length)) for name, length in documents]
            made = [copy.deepcopy(self.bare.get_encoder())(**each) for each in inputs]
        return type(made[0])(last_hidden_state=torch.cat([each.last_hidden_state for each in made], dim=1))

    def plain(self, *documents, answer=ANSWER, **options):
        """What the plain model gives that was handed the states of these documents."""
        with torch.no_grad():
            return self.bare(encoder_outputs=self.states(*documents), decoder_input_ids=answer, **options)

    def logits(self, prompt, answer=ANSWER):
        with torch.no_grad():
            return self.model(**prompt, decoder_input_ids=answer).logits


def exact(reading):
    one, two, three = ("one", 60), ("two", 40), ("prompt", 20)
    first, second = reading.read(one, two)
    with memstore.attach(reading.model, first, top_k="all") as attached:
        read = reading.logits({"encoder_outputs": attached.empty_prompt()})
    assert (read - reading.plain(one).logits).abs().max() < EXACT
    prompt = reading.family.inputs(reading.document(*three))
    with memstore.attach(reading.model, second, first, top_k="all"):
        read = reading.logits(prompt)
    assert (read - reading.plain(three, one, two).logits).abs().max() < EXACT
    assert (read - reading.plain(three).logits).abs().max() > 100 * EXACT  # the memories do matter


def generated(reading, **settings):
    """What the plain model writes about a document, and what is written with its memory attached."""
    document, settings = ("one", 60), {"max_new_tokens": 8, "do_sample": False, **settings}
    expected = reading.bare.generate(encoder_outputs=reading.states(document), **settings)
    with memstore.attach(reading.model, *reading.read(document), top_k="all") as attached:
        return expected, attached.generate(**settings)


def beams(reading):
    assert torch.equal(*generated(reading, num_beams=4))


def empty_prompt(reading):
    assert torch.equal(*generated(reading, num_beams=1))


def rows_of_their_own(reading):
    documents = [[("one", 60)], [("two", 40), ("three", 30)]]
    answer = tokens(7, seed=2, rows=2)
    rows = [reading.read(*row) for row in documents]
    with memstore.attach(reading.model, rows=rows, top_k="all") as attached:
        read = reading.logits({"encoder_outputs": attached.empty_prompt(2)}, answer)
    for i, row in enumerate(documents):
        assert (read[i] - reading.plain(*row, answer=answer[i : i + 1]).logits[0]).abs().max() < EXACT


def provenance(reading):
    """With a prompt of its own, of which the plain model's weights say what is left for the memories."""
    documents, prompt = [("one", 60), ("two", 40)], ("prompt", 20)
    for model in (reading.bare, reading.model):
        set_attention(model, "eager")  # which alone gives its weights
    length = reading.states(prompt).last_hidden_state.shape[1]
    weights = reading.plain(prompt, *documents, output_attentions=True).cross_attentions
    with memstore.attach(reading.model, *reading.read(*documents), top_k="all", explain=True) as attached:
        reading.logits(reading.family.inputs(reading.document(*prompt)))
        readings = list(attached.provenance())
    steps = range(weights[0].shape[2])
    assert {(each.step, each.row) for each in readings} == {(step, 0) for step in steps}
    assert {each.layer for each in readings} == set(range(len(weights)))
    for layer, given in enumerate(weights):
        shares = given[0, :, :, length:].sum(-1).mean(0).tolist()  # of each position, mean over heads
        for step in steps:
            mass = sum(each.mass for each in readings if (each.step, each.layer) == (step, layer))
            assert mass == pytest.approx(shares[step], abs=1e-4)


CELLS = {
    check.__name__.replace("_", " "): check for check in (exact, beams, empty_prompt, rows_of_their_own, provenance)
}


def test_every_column_has_its_test():
    assert list(CELLS) == list(COLUMNS)


@pytest.mark.filterwarnings("ignore::memstore.errors.GenericAdapterNotice")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cell_of_the_matrix(library, family, column):
    CELLS[column](Reading(family, library))
