"""Spans around the best-scored blocks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.reading.selection import BLOCK, Span, choose_spans, num_blocks, span_width


def scored(total: int, **best: float) -> torch.Tensor:
    """Scores of 0.01, and others at the blocks named ``b7``."""
    scores = torch.full((total,), 0.01)
    for name, score in best.items():
        scores[int(name[1:])] = score
    return scores


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    blocks=st.integers(1, 12),
    width=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_spans_lie_in_their_memories_in_order_and_spend_the_budget(
    lengths: list[int], blocks: int, width: int, seed: int
) -> None:
    total = sum(map(num_blocks, lengths))
    scores = torch.rand(total, generator=torch.Generator().manual_seed(seed))
    spans = choose_spans(scores, lengths, blocks, width)
    parts = scores.split([num_blocks(n) for n in lengths])
    assert spans == sorted(spans, key=lambda span: (float(parts[span.memory].max()), span))  # the best memory last
    chosen = set()
    for span in spans:
        assert 0 <= span.start < span.stop <= lengths[span.memory] and span.start % BLOCK == 0
        chosen |= {(span.memory, block) for block in range(span.start // BLOCK, num_blocks(span.stop))}
    assert len(chosen) == min(blocks, total)
    owners = [(memory, block) for memory, n in enumerate(lengths) for block in range(num_blocks(n))]
    assert owners[int(scores.argmax())] in chosen


def test_the_best_place_comes_first_and_touching_spans_are_joined() -> None:
    assert choose_spans(scored(20, b5=0.9, b15=0.8), [1280], 8, 4) == [Span(0, 256, 512), Span(0, 896, 1152)]
    assert choose_spans(scored(20, b5=0.9, b9=0.8), [1280], 8, 4) == [Span(0, 256, 768)]
    assert choose_spans(scored(20, b0=0.9), [70, 1160], 4, 4)[-1] == Span(0, 0, 70)  # the last block is shorter


def test_one_place_that_stands_out_is_read_at_full_width() -> None:
    assert span_width(scored(50, b20=0.9, b21=0.8, b40=0.4), 8) == 8  # block 21 is the same place
    assert span_width(scored(50, b20=0.9, b40=0.76), 8) == 4
    assert span_width(scored(50, b20=0.9, b40=0.76), 2) == 2
    assert span_width(torch.ones(3), 8) == 8
