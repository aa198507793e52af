"""What was read, held against the plain model's own attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore import binding
from memstore.attention import QUERY_CHUNK, Scoring, read_all
from memstore.errors import AttachError
from memstore.provenance import ledger
from memstore.provenance.passages import PASSAGE, Tally
from memstore.provenance.tail import GROUP, Outline
from memstore.reading import shelves
from tests.matrix import FAMILIES
from tests.models import build, randomised, set_attention, tokens

EXACT = 1e-5
PROMPT = 20


@pytest.fixture(scope="module")
def model():
    model = build("bart")
    set_attention(model, "eager")
    return model


def states(model, ids):
    with torch.no_grad():
        return model.get_encoder()(input_ids=ids[None]).last_hidden_state


def weights_of(model, *documents, answer, prompt=None):
    """The plain model's cross-attention over these token ids, read one after another: [L, H, T, n], float64."""
    encoded = torch.cat([states(model, ids) for ids in ([] if prompt is None else [prompt]) + list(documents)], dim=1)
    with torch.no_grad():
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded), decoder_input_ids=answer, output_attentions=True
        )
    return torch.stack(output.cross_attentions)[:, 0].double()


def passage_sums(weights):
    """[..., n] -> a list of the sums of 64 tokens."""
    return [part.sum(-1) for part in weights.split(PASSAGE, dim=-1)]


def as_dict(readings, *fields):
    """Masses by step, document, first token and these fields; each must be there once."""
    masses = {}
    for reading in readings:
        key = (reading.step, reading.document, reading.start_token, *(getattr(reading, name) for name in fields))
        assert key not in masses
        masses[key] = reading.mass
    return masses


def long(model, seed, length):
    """Token ids longer than the model's window of 64, which the tests let it read at once."""
    return tokens(length, seed=seed)


@pytest.mark.parametrize("family", ["bart", "t5", "t5gemma"])
@pytest.mark.parametrize("prompted", [False, True])
def test_every_head_of_every_layer_gave_what_the_plain_model_gives(library, family, prompted):
    """With a key bias (BART), a position bias (T5) and a soft cap (T5Gemma)."""
    model = randomised(FAMILIES[family].make)
    set_attention(model, "eager")
    one, two = tokens(60, seed=4), tokens(50, seed=5)
    prompt, answer = tokens(PROMPT, seed=3) if prompted else None, tokens(4, seed=1, rows=1)
    weights = weights_of(model, one, two, answer=answer, prompt=prompt)[..., PROMPT if prompted else 0 :]
    memories = [library.encode(model, input_ids=ids, name=name) for ids, name in ((one, "one"), (two, "two"))]
    with memstore.attach(model, *memories, top_k="all", explain=True) as attached, torch.no_grad():
        inputs = {"encoder_outputs": attached.empty_prompt()} if prompt is None else {"input_ids": prompt[None]}
        model(**inputs, decoder_input_ids=answer)
        each = as_dict(attached.provenance("each", "each"), "layer", "head")
        assert {(r.layer, r.head) for r in attached.provenance("mean", "max")} == {(None, None)}
        folded = {
            (heads, layers): as_dict(attached.provenance(heads, layers))
            for heads in ("mean", "max")
            for layers in ("mean", "max")
        }
        documents = attached.provenance().documents()
        retrieved = attached.provenance("each", "each").retrieved()
    expected = {"one": weights[..., :60].sum(-1), "two": weights[..., 60:].sum(-1)}  # [L, H, T], a passage each
    assert len(each) == 2 * expected["one"].numel()
    for (step, document, start, layer, head), mass in each.items():
        assert start == 0
        assert mass == pytest.approx(float(expected[document][layer, head, step]), abs=EXACT)
    fold = {"mean": lambda values, dim: values.mean(dim), "max": lambda values, dim: values.amax(dim)}
    for (heads, layers), masses in folded.items():
        for (step, document, _), mass in masses.items():
            wanted = fold[layers](fold[heads](expected[document], 1), 0)[step]
            assert mass == pytest.approx(float(wanted), abs=EXACT)
    assert [d.share for d in documents] == sorted((d.share for d in documents), reverse=True)
    for document in documents:
        assert document.share == pytest.approx(float(expected[document.document].mean()), abs=EXACT)
    assert {(r.low, r.high) for r in retrieved} == {(1.0, 1.0)} and len(retrieved) == len(each) // 2


@pytest.mark.parametrize("block", [None, 50])
def test_top_k_and_passages_of_long_documents(library, model, block):
    """Passages are counted from each document's beginning, whatever pieces it is kept and read in."""
    one, two = tokens(150, seed=4), tokens(131, seed=5)
    keep = {} if block is None else {"window": block, "overlap": 0}
    memories = [library.encode(model, input_ids=ids, name=name, **keep) for ids, name in ((one, "one"), (two, "two"))]
    kept = []
    for memory in memories:
        with memory.open() as opened:
            kept.append(torch.cat(opened.blocks("hidden")).clone())
    answer, k = tokens(3, seed=1, rows=1), 40
    with torch.no_grad():
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=torch.cat(kept)[None]),
            decoder_input_ids=answer,
            output_attentions=True,
        )
    full = output.cross_attentions[0][0].double()  # of the first layer, whose queries do not depend on what is read
    best = full.topk(k, dim=-1)
    some = torch.zeros_like(full).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    for top_k, weights in (("all", full), (k, some)):
        with memstore.attach(model, *memories, top_k=top_k, layers=[0], explain=True) as attached, torch.no_grad():
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=answer)
            readings = as_dict(attached.provenance("each"), "head")
            passages = attached.provenance().passages()
            retrieved = attached.provenance("each").retrieved()
        expected = {}
        for name, part in (("one", weights[..., :150]), ("two", weights[..., 150:])):
            for i, sums in enumerate(passage_sums(part)):
                expected[name, i * PASSAGE] = sums  # [H, T]
        for (name, start), sums in expected.items():
            for head, of_head in enumerate(sums.tolist()):
                for step, mass in enumerate(of_head):
                    assert readings.get((step, name, start, head), 0.0) == pytest.approx(mass, abs=EXACT)
        assert len(passages) == len({(p.document, p.start_token) for p in passages}) == 6
        for passage in passages:
            share = float(expected[passage.document, passage.start_token].mean())
            assert passage.share == pytest.approx(share, abs=EXACT)
            assert passage.end_token == min(passage.start_token + PASSAGE, 150 if passage.document == "one" else 131)
        held = torch.ones_like(best.values[..., 0]) if top_k == "all" else best.values.sum(-1)
        for r in retrieved:
            assert r.low == r.high == pytest.approx(float(held[r.head, r.step]), abs=EXACT)


def test_rows_with_their_own_memories(library, model):
    one, two, three = (library.encode(model, input_ids=tokens(60 - i, seed=i), name=str(i)) for i in range(3))
    rows = [[one, two], [three], [two, one]]
    answer = tokens(4, seed=1, rows=3)
    with memstore.attach(model, rows=rows, top_k="all", explain=True) as attached, torch.no_grad():
        model(encoder_outputs=attached.empty_prompt(3), decoder_input_ids=answer)
        together = attached.provenance("each")
        shares = {each.document: each.share for each in together.documents()}
    for row, memories in enumerate(rows):
        weights = weights_of(
            model, *(tokens(60 - int(m.name), seed=int(m.name)) for m in memories), answer=answer[row : row + 1]
        )
        of_row = as_dict([r for r in together if r.row == row], "layer", "head")
        at = 0
        for memory in memories:
            sums = weights[..., at : at + memory.num_tokens].sum(-1)
            at += memory.num_tokens
            for (step, document, _, layer, head), mass in of_row.items():
                if document == memory.name:
                    assert mass == pytest.approx(float(sums[layer, head, step]), abs=EXACT)
        assert {document for _, document, *_ in of_row} == {memory.name for memory in memories}
    assert sum(shares.values()) == pytest.approx(1, abs=EXACT) and shares["2"] == pytest.approx(1 / 3, abs=EXACT)


@pytest.mark.parametrize("by_hand", [False, True])
def test_beams_are_followed_to_the_sequences_that_are_returned(library, model, by_hand):
    memories = [library.encode(model, input_ids=tokens(60, seed=i), name=str(i)) for i in range(2)]
    search: dict[str, Any] = {
        "num_beams": 4,
        "num_return_sequences": 2,
        "max_new_tokens": 8,
        "do_sample": False,
        "length_penalty": 0.1,
    }
    with memstore.attach(model, *memories, explain=True) as attached:
        if by_hand:
            output = model.generate(
                encoder_outputs=attached.empty_prompt(), return_dict_in_generate=True, output_scores=True, **search
            )
            written, found = output.sequences, attached.provenance("each", beam_indices=output.beam_indices)
            assert {r.row for r in attached.provenance()} == {0, 1, 2, 3}
        else:
            written = attached.generate(**search)
            found = attached.provenance("each")
            assert all(r.token == written[r.row, r.step + 1] for r in found)
        assert isinstance(written, torch.Tensor) and {r.row for r in found} == {0, 1}
        for row in (0, 1):
            ids = written[row : row + 1]
            with torch.no_grad():
                model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=ids[:, :-1])
            length = len({r.step for r in found if r.row == row})
            assert length == int((ids[0, 1:] != model.config.pad_token_id).sum())
            taught = as_dict([r for r in attached.provenance("each") if r.step < length], "layer", "head")
            followed = as_dict([r for r in found if r.row == row], "layer", "head")
            assert followed.keys() == taught.keys()
            assert all(mass == pytest.approx(taught[key], abs=1e-4) for key, mass in followed.items())


def test_passes_that_read_all_tokens_anew_give_the_same(library, model):
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    found = []
    for cached in (True, False):
        with memstore.attach(model, memory, explain=True) as attached:
            attached.generate(max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=cached)
            found.append(as_dict(attached.provenance("each"), "layer", "head", "token"))
    assert found[0].keys() == found[1].keys() and {step for step, *_ in found[0]} == set(range(6))
    assert all(mass == pytest.approx(found[0][key], abs=EXACT) for key, mass in found[1].items())


def test_a_candidate_that_is_rejected_leaves_nothing(library, model):
    """Each token's reading is that of the position that produced it, whatever was guessed there before."""
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    helper = randomised(FAMILIES["bart"].make, seed=1)  # which mostly guesses wrong
    prompt = tokens(PROMPT, seed=3, rows=1)
    with memstore.attach(model, memory, explain=True) as attached:
        written = attached.generate(input_ids=prompt, max_new_tokens=8, do_sample=False, assistant_model=helper)
        read = as_dict(attached.provenance("each"), "layer", "head")
        with torch.no_grad():
            model(input_ids=prompt, decoder_input_ids=written[:, :-1])
        taught = as_dict(attached.provenance("each"), "layer", "head")
    assert read.keys() == taught.keys() and {step for step, *_ in read} == set(range(written.shape[1] - 1))
    assert all(mass == pytest.approx(taught[key], abs=EXACT) for key, mass in read.items())


def test_keys_and_values_that_are_read_whole(library):
    """The plain decoder on document and prompt in one, whose attention at its new tokens is all there is."""
    model = build("llama")
    set_attention(model, "eager")
    document, prompt = tokens(150), tokens(9, seed=1)
    with torch.no_grad():
        written = model.generate(
            input_ids=torch.cat([document, prompt])[None], max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
        weights = torch.stack(model(input_ids=written, output_attentions=True).attentions)[:, 0].double()
    memory = library.encode(model, input_ids=document, name="doc", window=256)
    with memstore.attach(model, memory, explain=True) as attached:
        read = attached.generate(input_ids=prompt[None], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        found = attached.provenance("each")
        retrieved = found.retrieved()
    assert torch.equal(read[0, 9:], written[0, 159:])
    masses = as_dict(found, "layer", "head")
    assert len(masses) == 4 * 3 * 3 * 6  # steps, passages, layers, heads
    for (step, _, start, layer, head), mass in masses.items():
        expected = weights[layer, head, 158 + step, start : min(start + PASSAGE, 150)].sum()
        assert mass == pytest.approx(float(expected), abs=EXACT)
    assert all(r.token == written[0, 159 + r.step] for r in found)
    assert {(r.low, r.high) for r in retrieved} == {(1.0, 1.0)}


def test_what_spans_hold_of_the_rest_is_not_claimed(library):
    model = build("llama")
    memory = library.encode(model, input_ids=tokens(300), name="doc", window=64)
    with memstore.attach(model, memory, budget=64, explain=True) as attached:
        attached.generate(input_ids=tokens(9, seed=1, rows=1), max_new_tokens=2, do_sample=False)
        provenance = attached.provenance()
        with pytest.raises(AttachError, match="does not score|scores nothing else"):
            provenance.retrieved()
    assert sum(d.share for d in provenance.documents()) == pytest.approx(
        sum(p.share for p in provenance.passages()), abs=EXACT
    )


def first_token(library, model, index=None):
    """The share that the best 32 rows hold for each head of the first layer, of each of two memories."""
    shares = []
    for name in ("answer", "none"):
        with memstore.attach(model, library[name], top_k=32, index=index, layers=[0], explain=True) as attached:
            with torch.no_grad():
                model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=torch.tensor([[2]]))
            shares.append(attached.provenance("each").retrieved())
    return shares


def test_the_tail_tells_a_memory_without_an_answer(library, model, monkeypatch):
    """Two memories of small random states; one has a state along what each head asks first."""
    asked = []
    original = shelves.Shelves.read
    memory = library.encode(model, input_ids=tokens(60), name="first")

    def noting(self, queries, *rest):
        asked.append(queries)
        return original(self, queries, *rest)

    monkeypatch.setattr(shelves.Shelves, "read", noting)
    with memstore.attach(model, memory, layers=[0]) as attached, torch.no_grad():
        model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=torch.tensor([[2]]))
    queries = asked[0][0, :, 0]  # [H, d]
    noise = torch.randn(4096, queries.shape[1], generator=torch.Generator().manual_seed(0)) * 0.1
    for name in ("answer", "none"):
        rows = noise.clone()
        if name == "answer":
            rows[:: 4096 // len(queries)][: len(queries)] = 20 * queries / queries.norm(dim=1, keepdim=True) ** 2
        given = iter(rows.split(64))
        monkeypatch.setattr(type(attached.adapter), "encode", lambda *_, given=given: {"hidden": next(given)[None]})
        library.encode(model, input_ids=tokens(4096), name=name, window=64, overlap=0, batch_size=1)
    found, nothing = first_token(library, model)
    assert min(share.low for share in found) > 0.9
    assert max(share.high for share in nothing) < 0.05
    for share in (*found, *nothing):
        assert share.low == share.high
    for shares, exact in zip(first_token(library, model, "faiss-flat"), (found, nothing), strict=True):
        for bounds, known in zip(shares, exact, strict=True):
            assert bounds.low - EXACT <= known.low <= bounds.high + EXACT
    assert max(share.high for share in shares) < 0.05  # also by its bounds there is no answer


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    scale=st.floats(0.1, 20),
    noted=st.sampled_from([None, [0, 2]]),
    many=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_passages_are_summed_however_the_document_is_cut(sizes, seed, scale, noted, many):
    generator = torch.Generator().manual_seed(seed)
    n, m = sum(sizes), QUERY_CHUNK + 3 if many else 3
    memory, queries = torch.randn(n, 8, generator=generator), torch.randn(m, 8, generator=generator) * scale
    rows = list(range(m)) if noted is None else [*noted, *([m - 1] if many else [])]
    with torch.no_grad():
        tally = Tally(None if noted is None else torch.tensor(rows))
        part = read_all(queries, memory.split(sizes), tally=tally)
        plain = read_all(queries, memory.split(sizes))
    scores = queries[rows].double() @ memory.double().T
    expected = torch.stack(passage_sums(scores.softmax(-1)), dim=-1)
    rounding = scores.abs().amax(-1, keepdim=True) * 2**-23  # of a score in float32, and so of the weight's logarithm
    assert ((tally.sums / part.l[rows] - expected).abs() < 1e-6 + 2 * rounding).all()
    assert torch.equal(part.o, plain.o) and torch.equal(part.m, plain.m)
    assert torch.allclose(part.l, plain.l, rtol=1e-5)


def test_a_gradient_goes_through_a_memory_that_is_watched():
    memory, queries = torch.randn(100, 8), torch.randn(3, 8, requires_grad=True)
    gradients = []
    for tally in (None, Tally()):
        part = read_all(queries, [memory], tally=tally)
        gradients.append(torch.autograd.grad((part.o / part.l).square().sum(), queries)[0])
    assert torch.equal(*gradients)


@given(
    sizes=st.lists(st.integers(1, 2 * GROUP + 5), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    spread=st.floats(0.01, 3),
    softcap=st.sampled_from([None, 1.5, 30.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_sum_of_all_weights_is_within_its_bounds(sizes, seed, spread, softcap):
    generator = torch.Generator().manual_seed(seed)
    middle = torch.randn(1, 6, generator=generator)
    memory = middle + torch.randn(sum(sizes), 6, generator=generator) * spread
    queries = torch.randn(4, 6, generator=generator)
    scoring = Scoring(torch.randn(4, 1, generator=generator) if softcap else None, softcap)
    scores = scoring(queries @ memory.T).double()
    low, high = Outline(memory.split(sizes)).log_sums(queries, scoring)
    known = torch.logsumexp(scores, dim=1)
    assert (low <= known + 1e-4).all() and (known <= high + 1e-4).all()
    if spread < 0.05:
        reach = float((memory - middle).norm(dim=1).max()) * float(queries.norm(dim=1).max())
        assert (high - low).max() < 4 * reach + 1e-4  # no row lies further than twice that from the mean of its group


@pytest.mark.parametrize("keyword", ["heads", "layers"])
def test_other_ways_of_taking_together_are_refused(library, model, keyword):
    other: dict[str, Any] = {keyword: "median"}
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    with memstore.attach(model, memory, explain=True) as attached:
        with pytest.raises(AttachError, match=f"{keyword}='median' must be"):
            attached.provenance(**other)
        assert list(attached.provenance()) == [] and attached.provenance().documents() == []


WRONG_BEAMS: list[Any] = ["x", [[0, 1]], torch.zeros(2, 3), torch.zeros(5, dtype=torch.long), torch.full((1, 3), 7)]


def test_what_cannot_be_told_is_refused(library, model):
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    with memstore.attach(model, memory, explain=True) as attached:
        attached.generate(max_new_tokens=3, num_beams=2)
        for beams in WRONG_BEAMS:
            with pytest.raises(AttachError, match="beam_indices of the last generation"):
                attached.provenance(beam_indices=beams)
        wrong: list[Any] = [0, -1, 1.5, True, "x"]
        for most in wrong:
            with pytest.raises(AttachError, match="must be a whole number of at least 1"):
                attached.provenance().passages(most)
        assert len(attached.provenance().passages(1)) == 1


def test_nothing_is_collected_unless_asked(library, model, monkeypatch):
    def never(*_):
        raise AssertionError

    for module, name in ((binding, "Ledger"), (ledger.Ledger, "__init__"), (shelves, "Tally"), (shelves, "Seen")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr("memstore_backends.exact.ExactIndex.search_and_sum", never)
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    for top_k in ("all", 20):
        with memstore.attach(model, memory, top_k=top_k) as attached:
            assert attached.generate(max_new_tokens=2, do_sample=False).shape[1] <= 3


def test_watching_changes_nothing(library, model):
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    answer = tokens(5, seed=1, rows=1)
    for top_k in ("all", 20):
        logits = []
        for explain in (False, True):
            with memstore.attach(model, memory, top_k=top_k, explain=explain) as attached, torch.no_grad():
                logits.append(model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=answer).logits)
        assert (logits[0] - logits[1]).abs().max() < 1e-5


def test_only_the_last_positions_of_a_long_pass_are_noted_where_all_would_not_fit(library, model, monkeypatch):
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    answer = tokens(5, seed=1, rows=1)
    found = []
    for held in (ledger.HELD, 3 * 6 * 3):  # numbers of one position: layers times heads, and one passage
        monkeypatch.setattr(ledger, "HELD", held)
        with memstore.attach(model, memory, top_k="all", explain=True) as attached, torch.no_grad():
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=answer)
            found.append(as_dict(attached.provenance("each"), "layer", "head"))
    assert {step for step, *_ in found[0]} == set(range(5)) and {step for step, *_ in found[1]} == {2, 3, 4}
    assert all(mass == pytest.approx(found[0][key], abs=EXACT) for key, mass in found[1].items())
