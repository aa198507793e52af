"""Rows of a cache that are moved, by generate or by hand, go on with what they read."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from transformers import Cache, DynamicCache

import memstore
from memstore.errors import AttachError
from memstore.reading.moving import MOVING
from tests.talks import BUDGET, Pointing, document, held, prompt, remember, shallow

EXACT = 1e-4


MOVES = {
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "repeated by name": (lambda cache: cache.batch_repeat_interleave(repeats=2), [0, 0, 1, 1]),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "twice": (
        lambda cache: (cache.batch_repeat_interleave(2), cache.reorder_cache(torch.tensor([3, 0, 2, 2]))),
        [1, 0, 1, 1],
    ),
}


def talk_of_two(library, model, rows=None, **options):
    """An attachment of two rows that read other blocks, and their cache after the prompt."""
    texts = [document(seed) for seed in (0, 5)]
    memories = [remember(library, model, text, f"doc-{i}") for i, text in enumerate(texts)]
    ids = torch.cat((prompt(43), prompt(87)))
    given = {"rows": [[memory] for memory in memories]} if rows else {}
    attached = memstore.attach(
        model, *([] if rows else memories[:1]), budget=BUDGET, selector=Pointing(), **given, **options
    )
    cache = DynamicCache(config=model.config)
    return attached, ids, cache


@pytest.mark.parametrize("when_full", ["error", "drop"])
@pytest.mark.parametrize("move", MOVES)
def test_rows_of_a_cache_that_are_moved_go_on_with_what_they_read(library, move, when_full):
    model = shallow()
    attached, ids, cache = talk_of_two(library, model, when_full=when_full)
    moved, origins = MOVES[move]
    with attached, torch.no_grad():
        model(input_ids=ids, **held(cache))
        assert attached.selection()[0] != attached.selection()[1]
        plain = copy.deepcopy(cache)
        steps = torch.tensor([[[11], [12]], [[13], [14]]])
        expected = [model(input_ids=step, **held(plain)).logits for step in steps]
        model(input_ids=steps[0], **held(cache))
        moved(cache)
        copied = copy.deepcopy(cache)
        for each in (cache, copied):
            logits = model(input_ids=steps[1][origins], **held(each)).logits
            assert (logits - expected[1][origins]).abs().max() < EXACT


def test_a_marked_cache_goes_when_nobody_holds_it_and_its_methods_are_as_they_were(library):
    model = shallow()
    methods = [getattr(Cache, name) for name in MOVING]
    attached, ids, cache = talk_of_two(library, model)
    with attached, torch.no_grad():
        model(input_ids=ids, **held(cache))
        assert [getattr(Cache, name) for name in MOVING] != methods
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    assert [getattr(Cache, name) for name in MOVING] == methods


class Roundabout(DynamicCache):
    """One way to move rows by means of another."""

    def batch_select_indices(self, indices):
        return self.reorder_cache(indices)


def test_copies_and_kinds_of_caches_follow_their_own_moves(library):
    model = shallow()
    attached, ids, _ = talk_of_two(library, model)
    step = torch.tensor([[11], [12]])
    with attached, torch.no_grad():
        cache = Roundabout(config=model.config)
        model(input_ids=ids, **held(cache))
        expected = model(input_ids=step, **held(copy.deepcopy(cache))).logits
        shallow_copy = copy.copy(cache)
        shallow_copy.layers = copy.deepcopy(cache.layers)
        shallow_copy.batch_select_indices(torch.tensor([1, 0]))
        assert (model(input_ids=step, **held(cache)).logits - expected).abs().max() < EXACT
        swapped = model(input_ids=step.flip(0), **held(shallow_copy)).logits
        assert (swapped - expected.flip(0)).abs().max() < EXACT


@pytest.mark.parametrize("beams", [[0, 0], [1, 1], [1, 0]])
def test_beams_of_a_turn_carry_what_they_read(library, beams):
    """As generate moves them: two rows of one talk that read different blocks, as the beams of an earlier turn may."""
    model = shallow()
    attached, ids, cache = talk_of_two(library, model)
    step = torch.tensor([[11], [11]])
    with attached, torch.no_grad(), attached._turns.begun((ids,), {}, None):
        model(input_ids=ids, **held(cache))
        expected = model(input_ids=step, **held(copy.deepcopy(cache))).logits[beams]
        cache.reorder_cache(torch.tensor(beams))
        assert (model(input_ids=step, **held(cache)).logits - expected).abs().max() < EXACT


def test_what_was_noted_ends_where_rows_are_moved_by_hand(library):
    model = shallow()
    attached, ids, cache = talk_of_two(library, model, explain=True)
    step = torch.tensor([[11], [12]])
    with attached, torch.no_grad():
        model(input_ids=ids, **held(cache))
        model(input_ids=step, **held(cache))
        assert len(attached.provenance()) == 4
        cache.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=step, **held(cache))
        assert len(attached.provenance()) == 2


def test_rows_of_a_cache_do_not_move_to_other_memories(library):
    model = shallow()
    attached, ids, cache = talk_of_two(library, model, rows=True)
    with attached, torch.no_grad():
        model(input_ids=ids, **held(cache))
        cache.batch_repeat_interleave(2)
        model(input_ids=torch.tensor([[11], [12], [13], [14]]), **held(cache))
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
        model(input_ids=torch.tensor([[11], [12], [13], [14]]), **held(cache))
        cache.reorder_cache(torch.tensor([2, 0, 1, 3]))
        with pytest.raises(AttachError, match="moved to where the attachment has other memories"):
            model(input_ids=torch.tensor([[11], [12], [13], [14]]), **held(cache))


def test_a_batch_that_its_cache_does_not_hold_is_refused(library):
    model = shallow()
    attached, ids, cache = talk_of_two(library, model)
    with attached, torch.no_grad():
        model(input_ids=ids, **held(cache))
        with pytest.raises(AttachError, match="4 rows goes on with a cache of 2"):
            model(input_ids=torch.tensor([[11], [12], [13], [14]]), **held(cache))
