"""Which blocks of long memories a prompt reads: every selector against an independent computation of its scores."""

from __future__ import annotations

import gc
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from memstore.errors import AttachError
from memstore.reading import choosing, selection
from memstore.reading.selection import BLOCK, bounds, num_blocks
from memstore.reading.selectors import SELECTORS, BlockSelector, Question, chosen_selector, scouting
from memstore.reading.selectors.by_index import ByIndex
from memstore.reading.selectors.hybrid import Hybrid
from memstore.reading.selectors.lexical import Lexical
from memstore.reading.selectors.scouting import PerLayer, Scouting
from tests import tiny
from tests.models import build, tokens

LAYERS, HEADS, GROUPS, WIDTH = 2, 6, 2, 8


class Kept:
    """Stands for a memory and for its open records: random keys, and whatever token ids are given."""

    def __init__(self, num_tokens: int, seed: int = 0, ids: list[int] | None = None, sink: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_tokens, self.name = num_tokens, f"kept-{seed}"
        self.token_ids = None if ids is None else np.asarray(ids, np.int32)
        self.text: str | None = None
        self.offsets: np.ndarray[Any, Any] | None = None
        self.manifest = SimpleNamespace(prefix_ids=tuple(range(sink)), has_ids=ids is not None)
        self.keys = [torch.randn(num_tokens, GROUPS, WIDTH, generator=generator).half() for _ in range(LAYERS)]
        self.sinks = [torch.randn(sink, GROUPS, WIDTH, generator=generator).half() for _ in range(LAYERS)]

    @property
    def memory(self) -> Kept:
        return self

    def gathered(self, part: str, stretches: list[tuple[int, int]]) -> torch.Tensor:
        assert all(0 <= start < stop <= self.num_tokens for start, stop in stretches)
        keys = self.keys[int(part.removeprefix("keys."))]
        return torch.cat([keys[start:stop] for start, stop in stretches])

    def blocks(self, part: str) -> list[torch.Tensor]:
        return list(bounds(self.keys[int(part.removeprefix("bounds."))]).split(3))

    def prefix(self, part: str) -> torch.Tensor:
        return self.sinks[int(part.removeprefix("keys."))]


def question(memories: list[Kept], rows: int = 1, length: int = 5, ids: Any = None, seed: int = 9) -> Question:
    """Random queries of all tokens but the first of every row."""
    generator = torch.Generator().manual_seed(seed)
    queries = {i: 2 * torch.randn(rows, HEADS, length, WIDTH, generator=generator) for i in range(LAYERS)}
    asks = torch.ones(rows, length, dtype=torch.bool)
    asks[:, 0] = False
    adapter: Any = SimpleNamespace(num_kv_heads=GROUPS)
    kept: Any = memories
    return Question(adapter, kept, kept, range(LAYERS), asks, None if ids is None else torch.as_tensor(ids), queries)


def attention_shares(asked: Question, row: int) -> torch.Tensor:
    """[layers, blocks]: one query after the other, over every key of every memory."""
    memories: Any = asked.memories
    sink = next((memory.sinks for memory in memories if memory.manifest.prefix_ids), None)
    found = torch.zeros(LAYERS, asked.num_blocks)
    for layer, query in asked.queries.items():
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for t in asked.asks[row].nonzero().flatten().tolist():
                q = query[row, head, t]
                best = [
                    float((memory.keys[layer][start : start + BLOCK, group].float() @ q).max())
                    for memory in memories
                    for start in range(0, memory.num_tokens, BLOCK)
                ]
                if sink is not None:
                    best.append(float((sink[layer][:, group].float() @ q).max()))
                share = torch.tensor(best).softmax(0)[: asked.num_blocks]
                found[layer] = torch.maximum(found[layer], share)
    return found


def naive_bm25(documents: list[list[int]], asked: list[int]) -> list[float]:
    """Robertson and Zaragoza's formula, document by document."""
    mean, scores = sum(map(len, documents)) / len(documents), []
    for document in documents:
        score, counts = 0.0, Counter(document)
        for token in asked:
            holding = sum(token in each for each in documents)
            rarity = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            norm = 1.2 * (1 - 0.75 + 0.75 * len(document) / mean)
            score += rarity * counts[token] * 2.2 / (counts[token] + norm)
        scores.append(score)
    return scores


def as_blocks(ids: list[int]) -> list[list[int]]:
    return [ids[start : start + BLOCK] for start in range(0, len(ids), BLOCK)]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 400), seed=st.integers(0, 2**16), size=st.floats(0.01, 100))
def test_no_key_of_a_block_scores_more_than_its_bound(n: int, seed: int, size: float) -> None:
    memory = Kept(n, seed)
    asked = question([memory], seed=seed)
    query = asked.queries[0][0] * size
    [bound] = scouting.bound_scores(asked, 0, query)
    for head, of_head in enumerate(query):
        exact = memory.keys[0][:, head // (HEADS // GROUPS)].float() @ of_head.T
        best = torch.stack([block.amax(0) for block in exact.split(BLOCK)], dim=1)
        assert (best <= bound[head, :, :-1] + 1e-5 * size).all()


@pytest.mark.parametrize("sink", [0, 3])
@pytest.mark.parametrize("lengths", [[700], [130, 64, 333]], ids=str)
def test_scouting_that_reads_every_block_is_attention_by_brute_force(lengths: list[int], sink: int) -> None:
    memories = [Kept(n, seed=i, sink=sink) for i, n in enumerate(lengths)]
    asked = question(memories, rows=2)
    expected = torch.stack([attention_shares(asked, row) for row in (0, 1)], dim=1)
    assert (PerLayer().score(asked) - expected).abs().max() < 1e-6
    assert (Scouting().score(asked) - expected.mean(0)).abs().max() < 1e-6


def test_few_candidates_keep_the_best_and_score_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are those that the bounds find best; the share is one among them."""
    monkeypatch.setattr(scouting, "CANDIDATES", 4)
    monkeypatch.setattr(scouting, "SCORES", 1)  # one token at a time
    asked = question([Kept(64 * 9 + 5), Kept(64 * 3, seed=1)], length=9)
    place, strength = 7, 3.0
    for i, keys in enumerate(asked.memories[0].keys):  # type: ignore[attr-defined]
        for group in range(GROUPS):
            keys[64 * place + 11, group] = strength * asked.queries[i][0, group * 3, 4]
    scores = Scouting().score(asked)[0]
    assert int(scores.argmax()) == place and int((scores > 0).sum()) == 4


def test_bounds_are_kept_while_a_memory_is_open_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    blocks = Kept.blocks

    def noted(self: Kept, part: str) -> list[torch.Tensor]:
        read.append(part)
        return blocks(self, part)

    monkeypatch.setattr(Kept, "blocks", noted)
    memories, held = [Kept(300), Kept(70, seed=1)], len(scouting._kept)
    first = Scouting().score(question(memories))
    assert read == ["bounds.0"] * 2 + ["bounds.1"] * 2
    assert torch.equal(Scouting().score(question(memories)), first) and len(read) == 4
    monkeypatch.setattr(scouting, "KEPT_BYTES", 0)
    assert torch.equal(Scouting().score(question([Kept(300), Kept(70, seed=1)])), first) and len(read) == 8
    del memories
    gc.collect()
    assert len(scouting._kept) == held


def test_a_row_that_asks_nothing_has_no_scores() -> None:
    asked = question([Kept(300)], rows=2)
    asked.asks[1] = False
    scores = Scouting().score(asked)
    assert (scores[0] > 0).any() and not scores[1].any()


ids_of_some_memories = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=200), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(documents=ids_of_some_memories, asked=st.lists(st.integers(0, 12), min_size=2, max_size=12))
def test_bm25_by_the_formula_over_all_memories_as_one_collection(documents: list[list[int]], asked: list[int]) -> None:
    memories: Any = [Kept(len(ids), ids=ids) for ids in documents]
    lexical = Lexical()
    lexical.prepare(memories)
    scores = lexical.score(question(memories, length=len(asked), ids=[asked]))[0]
    expected = naive_bm25([block for ids in documents for block in as_blocks(ids)], asked[1:])  # the first asks nothing
    assert scores.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(st.lists(st.sampled_from(["a", " word", "\n\n", "?", " 7", "\u00e9"]), min_size=1, max_size=150))
def test_only_tokens_with_a_letter_or_a_digit_are_looked_for(pieces: list[str]) -> None:
    vocabulary = sorted(set(pieces))
    ids = [vocabulary.index(piece) for piece in pieces]
    memory: Any = Kept(len(ids), ids=ids)
    memory.text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
    memory.offsets = np.stack((ends - [len(piece) for piece in pieces], ends), axis=1)
    lexical = Lexical()
    lexical.prepare([memory])
    for token, piece in enumerate(vocabulary):
        scores = lexical.score(question([memory], length=2, ids=[[0, token]]))[0]
        assert bool((scores > 0).any()) == (piece not in ("\n\n", "?"))


def test_the_hybrid_reads_what_words_point_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks whose keys are read, one is chosen by its bounds and one by its words; both scores are summed."""
    monkeypatch.setattr(scouting, "CANDIDATES", 1)
    ids = [1] * 640
    ids[64 * 3 + 7] = 2
    memories: Any = [Kept(640, ids=ids)]
    hybrid, lexical, asked = Hybrid(), Lexical(), question(memories, ids=[[1, 2, 2, 1, 1]])
    hybrid.prepare(memories)
    lexical.prepare(memories)
    words = lexical.score(asked)
    bare = Scouting().score(asked)[0].nonzero().flatten().tolist()
    assert int(words[0].argmax()) == 3 and bare != [3] and len(bare) == 1
    seen = Scouting().score(asked, words)
    assert sorted(seen[0].nonzero().flatten().tolist()) == sorted([*bare, 3])
    assert torch.allclose(hybrid.score(asked), seen / seen.max() + 2 * words / words.max())


def test_the_hybrid_is_scouting_alone_where_words_are_missing() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 400).tolist()
    for with_ids, given_ids in ((None, [[1, 2, 3, 4, 5]]), (ids, None)):
        memories: Any = [Kept(400, ids=with_ids)]
        hybrid, asked = Hybrid(), question(memories, ids=given_ids)
        hybrid.prepare(memories)
        seen = Scouting().score(asked)
        assert torch.equal(hybrid.score(asked).argsort(), seen.argsort())


@pytest.fixture(scope="module")
def llama() -> Any:
    """Attention of random weights is so flat that rounding would decide between blocks; here it is sharper."""
    model = tiny.llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 12
            layer.self_attn.k_proj.weight *= 12
    return model


def words(length: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, length))


@pytest.fixture
def memories(library: Any, llama: Any) -> list[Any]:
    """Three long memories behind one header."""
    encode = {"tokenizer": tiny.tokenizer(), "window": 128, "dtype": "float32"}
    return [
        library.encode(llama, input_ids=words(n, i), name=f"doc-{i}", **encode) for i, n in enumerate((1200, 700, 1000))
    ]


def read(model: Any, memories: list[Any], prompt: torch.Tensor, **options: Any) -> tuple[torch.Tensor, set[Any]]:
    """Logits for a prompt, and the blocks that it chose: (layer, document, first token)."""
    with memstore.attach(model, *memories, explain=True, budget=256, **options) as attached, torch.no_grad():
        logits = model(input_ids=prompt).logits
        attached.generate(input_ids=prompt, max_new_tokens=1)
        read = attached.provenance()
    return logits, {(each.layer, each.document, each.start_token) for each in read}


@pytest.mark.parametrize("selector", ["hybrid", "scouting", "lexical", "per-layer", "index"])
def test_the_order_of_memories_does_not_matter(
    llama: Any, memories: list[Any], selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "WIDTH", 1)  # so that blocks of several memories are read
    monkeypatch.setattr(selection, "CLEAR", math.inf)
    known = [token for i, memory in enumerate(memories) for token in memory.token_ids[300 + i : 312 + i].tolist()]
    prompt = torch.tensor([known])
    orders = [memories, memories[::-1], [memories[1], memories[2], memories[0]]]
    layers = [1] if selector == "per-layer" else None  # a token has the same key wherever layer 0 reads it
    logits, blocks = zip(
        *(read(llama, order, prompt, selector=selector, layers=layers) for order in orders), strict=True
    )
    assert blocks[0] == blocks[1] == blocks[2]
    assert len({document for _, document, _ in blocks[0]}) > 1  # else there is no order
    assert all((each - logits[0]).abs().max() < 1e-4 for each in logits[1:])


def test_every_layer_reads_its_own_spans(llama: Any, memories: list[Any]) -> None:
    """A selector of the user's own, by layer: what a layer reads, and in what passages it is told."""

    class Split(BlockSelector):
        needs_queries = False

        def score(self, question: Question) -> torch.Tensor:
            scores = torch.zeros(len(question.layers), len(question.asks), question.num_blocks)
            for of_layer, layer in zip(scores, question.layers, strict=True):
                of_layer[:, (2, 21)[layer]] = 1  # the first memory has 19 blocks
            return scores

    for layers, expected in ((None, {(0, "doc-0"), (1, "doc-1")}), ([1], {(1, "doc-1")})):
        _, blocks = read(llama, memories, words(9, 7)[None], selector=Split(), layers=layers)
        assert {(layer, document) for layer, document, _ in blocks} == expected
        if layers is None:
            assert {start for layer, _, start in blocks if layer == 0} == {64, 128, 192, 256}
            assert {start for layer, _, start in blocks if layer == 1} == {64, 128, 192, 256}


@pytest.mark.parametrize("layers", [[0], [1]])
def test_layers_that_do_not_read_are_not_asked(llama: Any, memories: list[Any], layers: list[int]) -> None:
    logits, blocks = read(llama, memories, words(9, 7)[None], selector="per-layer", layers=layers)
    assert logits.isfinite().all() and {layer for layer, _, _ in blocks} == set(layers)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_exact_index_finds_what_scouting_finds(library: Any, family: str) -> None:
    model = build(family)
    several = [library.encode(model, input_ids=tokens(400, seed=i), name=f"d{i}", window=64) for i in range(2)]
    prompt = tokens(9, seed=7, rows=1)
    logits, blocks = read(model, several, prompt, selector="scouting")
    by_index = read(model, several, prompt, selector="index", index="exact")
    assert by_index[1] == blocks and (by_index[0] - logits).abs().max() < 1e-5


@pytest.mark.parametrize("configured", [False, True])
def test_the_hybrid_finds_blocks_by_an_index_that_is_named_or_configured(
    llama: Any, memories: list[Any], monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    """By a scan of all keys it chooses what scouting and words choose; a configured scan is left alone."""
    asked: list[int] = []
    prepare = ByIndex.prepare

    def noting(self: ByIndex, opened: Any) -> None:
        asked.append(len(opened))
        prepare(self, opened)

    monkeypatch.setattr(ByIndex, "prepare", noting)
    scanned = read(llama, memories, words(9, 7)[None])
    assert not asked
    if configured:
        monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "numpy")
    by_index = read(llama, memories, words(9, 7)[None], **({} if configured else {"index": "numpy"}))
    assert asked and by_index[1] == scanned[1] and (by_index[0] - scanned[0]).abs().max() < 1e-5


def test_rows_with_equal_and_other_prompts_and_memories(llama: Any, memories: list[Any]) -> None:
    prompts = torch.stack([words(24, 5), words(24, 5), words(24, 6), words(24, 5)])
    rows = [[memories[0]], [memories[1], memories[2]], [memories[1], memories[2]], [memories[0]]]
    with memstore.attach(llama, rows=rows, budget=128), torch.no_grad():
        together = llama(input_ids=prompts).logits
    for row, own in enumerate(rows):
        with memstore.attach(llama, *own, budget=128), torch.no_grad():
            alone = llama(input_ids=prompts[row : row + 1]).logits
        assert (together[row] - alone[0]).abs().max() < 1e-5


class Hears(BlockSelector):
    """Keeps what it is asked, and speaks for nothing."""

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def score(self, question: Question) -> torch.Tensor:
        self.questions.append(question)
        return torch.zeros(len(question.asks), question.num_blocks)


def test_of_a_long_prompt_the_end_asks(llama: Any, memories: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last tokens ask, and the pass begins as many before them; padding before the prompt changes nothing."""
    prompt, hears = words(60, 5), Hears()
    padded = torch.cat((torch.full((7,), 257), prompt))[None]
    passes: list[int] = []
    hook = llama.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with memstore.attach(llama, *memories, selector=hears, budget=128), torch.no_grad():
        llama(input_ids=prompt[None])
        monkeypatch.setattr(choosing, "ASKING", 10)
        llama(input_ids=prompt[None])
        llama(input_ids=padded, attention_mask=(torch.arange(67) >= 7).long()[None])
    hook.remove()
    assert sorted(passes) == [20, 20, 60, 60, 60, 67]  # each prompt is passed over, and read
    whole, end, behind_padding = hears.questions
    assert int(whole.asks.sum()) == 60 and int(end.asks.sum()) == int(behind_padding.asks.sum()) == 10
    assert end.token_ids is not None and end.token_ids[0].tolist() == prompt[-10:].tolist()
    assert (end.queries[0] - whole.queries[0][:, :, -10:]).abs().max() < 1e-4  # the first layer looks at no other token
    assert all((end.queries[i] - behind_padding.queries[i]).abs().max() < 1e-4 for i in (0, 1))


class Wrong(BlockSelector):
    """Answers with whatever it is given."""

    needs_queries = False

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def score(self, question: Question) -> Any:
        return self.answer


WRONG = {
    "blocks": torch.zeros(1, 3),
    "nan": torch.full((1, 46), math.nan),
    "layers": torch.zeros(5, 1, 46),
    "none": None,
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_scores_of_another_shape_or_of_no_numbers_are_refused(llama: Any, memories: list[Any], answer: Any) -> None:
    with (
        memstore.attach(llama, *memories, selector=Wrong(answer), budget=128),
        pytest.raises(AttachError, match="Wrong"),
    ):
        llama(input_ids=words(9, 7)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": "scout"}, "must be one of hybrid"),
        ({"selector": Scouting}, "must be one of hybrid"),
        ({"selector": "lexical", "index": "exact"}, "needs none"),
        ({"selector": Scouting(), "index": "exact"}, "needs none"),
    ],
    ids=["unknown", "class", "name", "instance"],
)
def test_what_is_no_selector(llama: Any, memories: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(AttachError, match=message):
        memstore.attach(llama, *memories, **options)


def test_words_cannot_be_compared_without_words(library: Any, llama: Any, memories: list[Any]) -> None:
    embeddings = llama.get_input_embeddings()(words(9, 7)[None]).detach()
    with memstore.attach(llama, *memories, selector="lexical"), pytest.raises(AttachError, match="embeddings"):
        llama(inputs_embeds=embeddings)
    with memstore.attach(llama, *memories), torch.no_grad():
        by_embeddings = llama(inputs_embeds=embeddings).logits
    with memstore.attach(llama, *memories, selector="scouting"), torch.no_grad():
        assert torch.equal(llama(inputs_embeds=embeddings).logits, by_embeddings)
    lexical = Lexical()
    kept: Any = [Kept(200)]
    with pytest.raises(AttachError, match="no token ids"):
        lexical.prepare(kept)


def test_names_stand_for_selectors() -> None:
    for name, kind in SELECTORS.items():
        assert type(chosen_selector(name, None)) is kind
    assert isinstance(chosen_selector(None, None), Hybrid)
    own = Scouting()
    assert chosen_selector(own, None) is own and num_blocks(BLOCK + 1) == 2
