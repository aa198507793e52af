"""Attention over a memory: absorbed projections, the partial softmax and its merge.

Notation: B batch rows, H heads, T query positions, n memory tokens, d width of the encoder states, c width of one head.
All is computed in float32, whatever the dtype of the memory: a stored block is converted as it is read. But
:func:`fused_attention` computes in the dtype of the query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from memstore.provenance.passages import Tally

Note = Callable[[Tensor], None]

QUERY_CHUNK = 1024  # rows of queries scored at once, so that a long prompt never needs a [T, n] matrix of its own
PIECE = 1 << 17  # numbers of a memory read at once on a CPU: 512 KiB, which the cache of a core holds
LOWEST = -60.0  # score beside the highest: exp of much less is no normal number, with which a CPU computes slowly
ROW_CHUNK = 1 << 24  # numbers gathered at once for top-k: 64 MiB


class Partial(NamedTuple):
    """Softmax attention over one set of keys, left unnormalised so that disjoint sets can be merged exactly.

    With scores s_i and values v_i:  m = max s_i,  l = sum exp(s_i - m),  o = sum exp(s_i - m) v_i.
    Shapes: m and l [..., 1], o [..., d]. The empty set is m = -inf, l = 0, o = 0.
    """

    m: Tensor
    l: Tensor  # noqa: E741  (the name the papers use)
    o: Tensor


def shifted_exp(scores: Tensor, m: Tensor) -> Tensor:
    """exp(scores - m), and 0 where both are -inf: a fully masked set must not become NaN."""
    return torch.exp(scores - torch.where(m == -torch.inf, 0.0, m))


def highest(scores: Tensor) -> Tensor:
    """max s_i [..., 1] of scores [..., n]: -inf where there are none."""
    return scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -torch.inf)


def partial_attention(scores: Tensor, values: Tensor, note: Note | None = None) -> Partial:
    """The partial softmax of scores [..., n] over values [..., n, d]. ``note`` is given its weights exp(s_i - m)."""
    m = highest(scores)
    weights = shifted_exp(scores, m)
    if note is not None:
        note(weights)
    return Partial(m, weights.sum(-1, keepdim=True), torch.einsum("...n,...nd->...d", weights, values))


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the disjoint union of the parts' key sets: exact, and independent of how they were cut.

    m = max m_j,  l = sum exp(m_j - m) l_j,  o = sum exp(m_j - m) o_j.
    """
    m = torch.stack([part.m for part in parts]).amax(0)
    scales = [shifted_exp(part.m, m) for part in parts]
    l = sum((part.l * scale for part, scale in zip(parts, scales, strict=True)), torch.zeros_like(m))  # noqa: E741
    o = sum((part.o * scale for part, scale in zip(parts, scales, strict=True)), torch.zeros_like(parts[0].o))
    return Partial(m, l, o)


def normalise(part: Partial) -> Tensor:
    """o / l [..., d]: the attention output. Zero for the empty set, and finite in its gradient."""
    return part.o / part.l.masked_fill(part.l == 0, 1.0)


def split_heads(weight: Tensor, num_heads: int) -> Tensor:
    """A projection's weight [H*c, d] or bias [H*c] by head: [H, c, d] or [H, c]. A view, never a copy."""
    return weight.view(num_heads, -1, *weight.shape[1:])


def absorb_keys(query: Tensor, key_weight: Tensor) -> Tensor:
    """q W_k^T: the query [B, H, T, c] is projected into the space of the memory [B, H, T, d], so that no key is made.

    Unlimiformer (Bertsch et al. 2023), section 2.3, equation 1: (h_d W_q) (h_e W_k)^T = (h_d W_q W_k^T) h_e^T.
    """
    return query.float() @ key_weight.float()


def absorb_values(part: Partial, value_weight: Tensor, value_bias: Tensor | None) -> Partial:
    """Map a sum of memory states o [B, H, T, d] to a sum of values [B, H, T, c], after the weighted sum.

    The weights of an unnormalised sum add up to l, so the bias enters l times: (sum w_i h_i) W_v + l b_v.
    """
    o = part.o @ value_weight.float().transpose(1, 2)
    if value_bias is not None:
        o = o + part.l * value_bias.float()[None, :, None]
    return Partial(part.m, part.l, o)


class Scoring(NamedTuple):
    """What becomes of the inner products of scaled queries [m, d] with a memory's rows before their softmax.

    bias: [m, 1], added to all scores of a query (its key bias), or None. softcap: scores s become
    softcap · tanh(s / softcap), or None. Both keep the order of a query's scores, so a search need not know of them.
    """

    bias: Tensor | None = None
    softcap: float | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """The scores [m, n] of the softmax."""
        scores = scores if self.bias is None else scores + self.bias
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def split(self, size: int) -> Iterator[Scoring]:
        """Those of the queries cut into chunks of ``size``."""
        if self.bias is None:
            return repeat(self)
        return (Scoring(bias, self.softcap) for bias in self.bias.split(size))


PLAIN = Scoring()


def read_all(
    queries: Tensor, blocks: Iterable[Tensor], scoring: Scoring = PLAIN, tally: Tally | None = None
) -> Partial:
    """Attend from queries [m, d] to every row of the blocks [n_i, d]; rows are both keys and values.

    Queries are scaled already. One pass over the memory: each piece of it is converted, scored and summed while it is
    in the cache, and added to what was summed before. A ``tally`` sums the weights by passage on the way.
    """
    chunks = queries.float().split(QUERY_CHUNK)
    scorings = [each for each, _ in zip(scoring.split(QUERY_CHUNK), chunks, strict=False)]
    parts = [nothing_read(chunk, chunk.shape[1]) for chunk in chunks]
    tallies = [None] * len(chunks) if tally is None else tally.split(QUERY_CHUNK, len(queries))
    on_cpu, size = queries.device.type == "cpu", max(PIECE // queries.shape[1], len(chunks[0]))
    size += -size % 64  # pieces that end where passages do
    # Every piece is converted into the same place, which stays in the cache, unless a gradient needs all of them.
    place = queries.new_empty(size, queries.shape[1], dtype=torch.float32) if on_cpu else None
    for block in blocks:
        for piece in block.split(size if on_cpu else len(block)):
            if place is None or piece.dtype == torch.float32 or torch.is_grad_enabled():
                rows = piece.to(device=queries.device, dtype=torch.float32)
            else:
                rows = place[: len(piece)].copy_(piece)
            parts = [
                with_more(part, score(chunk @ rows.T), rows, each)
                for part, chunk, score, each in zip(parts, chunks, scorings, tallies, strict=True)
            ]
    part = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    return part if tally is None or not tally.sums_all else part._replace(l=tally.sums.sum(-1, keepdim=True))


def nothing_read(queries: Tensor, width: int) -> Partial:
    """The part of each query [m, d] before any key was read, for values of ``width`` numbers."""
    m = len(queries)
    return Partial(queries.new_full((m, 1), -torch.inf), queries.new_zeros((m, 1)), queries.new_zeros((m, width)))


def with_more(part: Partial, scores: Tensor, values: Tensor, tally: Tally | None = None) -> Partial:
    """The part [m, ...] after more keys, with scores [m, n], all finite, and values [n, d]: the running softmax of
    FlashAttention (Dao et al. 2022), section 3.1.

    m' = max(m, max s_i),  l' = exp(m - m') l + sum exp(s_i - m'),  o' = exp(m - m') o + sum exp(s_i - m') v_i.
    Where a ``tally`` sums all weights, l is left to it: so watching costs hardly an operation more.
    """
    m = torch.maximum(part.m, scores.amax(-1, keepdim=True))
    if (m > part.m).any():  # seldom after the first pieces, and where it is not, the scale is 1
        scale = shifted_exp(part.m, m)
        part = Partial(m, scale * part.l, scale * part.o)
    weights = (scores - part.m).clamp_min_(LOWEST).exp_()
    if tally is not None:
        tally.add(weights, part.m)
    l = part.l if tally is not None and tally.sums_all else part.l + weights.sum(-1, keepdim=True)  # noqa: E741
    return Partial(part.m, l, torch.addmm(part.o, weights, values))


def read_rows(
    queries: Tensor,
    gather: Callable[[Tensor], Tensor],
    ids: Tensor,
    scoring: Scoring = PLAIN,
    note: Note | None = None,
) -> Partial:
    """Attend from each query [m, d] to its own rows ids [m, k]; id -1 is an empty slot.

    ``gather`` returns the rows of flat ids [j] as [j, d]. The index only chose the rows: their scores are computed
    anew, exactly (top-k attention, Unlimiformer section 2.2). ``note`` is given the weights [m', k] of a chunk of the
    queries at a time, in order, relative to m.
    """
    at_once = max(1, ROW_CHUNK // (ids.shape[1] * queries.shape[1]))
    parts = []
    chunks = zip(queries.float().split(at_once), ids.split(at_once), strict=True)
    for (some, chosen), score in zip(chunks, scoring.split(at_once), strict=False):
        rows = gather(chosen.clamp_min(0).flatten()).float().view(*chosen.shape, -1)
        scores = score(torch.einsum("md,mkd->mk", some, rows))
        parts.append(partial_attention(scores.masked_fill(chosen < 0, -torch.inf), rows, note))
    return Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def ordinary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    note: Note | None = None,
) -> Partial:
    """Scaled dot-product attention of query [B, H, T, c] over key and value [B, G, n, c], as a mergeable part.

    G key-value heads are shared by groups of H / G heads. ``mask`` [B or 1, 1 or H, T or 1, n] is boolean (True is
    seen), additive, or None (everything is seen); ``bias`` is added to the scores (T5's relative positions), which are
    soft-capped first (Gemma's). ``note`` is given the weights [B, H, T', n] of a chunk of the positions at a time, in
    order, relative to m. T is at least 1; no keys (n = 0) are the empty set.
    """
    parts = [
        _ordinary_chunk(
            chunk,
            key,
            value,
            rows_of(mask, start, start + QUERY_CHUNK),
            scaling,
            rows_of(bias, start, start + QUERY_CHUNK),
            softcap,
            note,
        )
        for start, chunk in zip(range(0, query.shape[2], QUERY_CHUNK), query.split(QUERY_CHUNK, dim=2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(t, dim=2) for t in zip(*parts, strict=True)))


def _ordinary_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    bias: Tensor | None,
    softcap: float | None,
    note: Note | None,
) -> Partial:
    b, h, t, c = query.shape
    groups, n = key.shape[1], key.shape[2]
    grouped = query.float().reshape(b, groups, -1, c)  # heads of one group stand together: [B, G, H/G * T, c]
    scores = (grouped @ key.float().transpose(2, 3)).view(b, h, t, n) * scaling
    scores = Scoring(softcap=softcap)(scores)
    if bias is not None:
        scores = scores + bias.float()
    if mask is not None:
        scores = scores + additive(mask, torch.float32)
    m = highest(scores)
    weights = shifted_exp(scores, m)
    if note is not None:
        note(weights)
    o = (weights.view(b, groups, h // groups * t, n) @ value.float()).view(b, h, t, -1)
    return Partial(m, weights.sum(-1, keepdim=True), o)


def fused_attention(query: Tensor, sets: Sequence[tuple[Tensor, Tensor, Tensor | None]], scaling: float) -> Tensor:
    """Attention [B, H, T, c] of query [B, H, T, c] over the union of disjoint sets of keys, where nobody asks for the
    weights: softmax([q k_1, q k_2, ...]) [v_1, v_2, ...] by one kernel of torch, in the query's dtype.

    Each set is key and value [B or 1, G, n_i, c] and a mask as for :func:`ordinary_attention`; an additive one is
    rounded to the query's dtype. Zero where all is hidden. T is at least 1, and so is the sum of the n_i. The kernel
    keeps no matrix of scores (FlashAttention, Dao et al. 2022).
    """
    outputs = []
    for start, chunk in zip(range(0, query.shape[2], QUERY_CHUNK), query.split(QUERY_CHUNK, dim=2), strict=True):
        seen = [_seen(key, value, rows_of(mask, start, start + QUERY_CHUNK)) for key, value, mask in sets]
        outputs.append(_fused_chunk(chunk, seen, scaling))
    return torch.cat(outputs, dim=2)


def _seen(key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """A set of keys without those at its ends that no query of the mask sees: those still to come of a causal mask,
    those too far back of a sliding window. A GPU is waited for: a static cache, a long prompt or a window repay it."""
    if mask is None:
        return key, value, mask
    places = (~hidden_by(mask)).flatten(0, 2).any(0).nonzero()
    some = slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(1)  # a kernel wants some key
    return key[:, :, some], value[:, :, some], mask[..., some]


def _fused_chunk(query: Tensor, sets: Sequence[tuple[Tensor, Tensor, Tensor | None]], scaling: float) -> Tensor:
    """:func:`fused_attention` of a chunk of the queries."""
    b, h, t, _ = query.shape

    def side_by_side(tensors: Sequence[Tensor]) -> Tensor:  # [B or 1, G, n_i, c] -> [B, H, sum n_i, c]
        joined = torch.cat([each.to(query.dtype).expand(b, -1, -1, -1) for each in tensors], dim=2)
        return joined.repeat_interleave(h // joined.shape[1], dim=1)

    keys, values = side_by_side([key for key, _, _ in sets]), side_by_side([value for _, value, _ in sets])
    added = [
        query.new_zeros(1, 1, 1, key.shape[2]) if mask is None else additive(mask, query.dtype) for key, _, mask in sets
    ]
    rows, heads = (max(each.shape[i] for each in added) for i in (0, 1))
    bias = torch.cat([each.expand(rows, heads, t, -1) for each in added], dim=-1)
    blind = bias.amax(-1, keepdim=True) == -torch.inf  # of which no kernel can be trusted to give no NaN, or gradient
    output = scaled_dot_product_attention(query, keys, values, bias.masked_fill_(blind, 0.0), scale=scaling)
    return output.masked_fill(blind, 0.0)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores of this dtype: -inf where it hides, and finite everywhere else."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    finite = torch.finfo(dtype)
    return mask.to(dtype).clamp(finite.min, finite.max).masked_fill(hidden_by(mask), -torch.inf)


def hidden_by(mask: Tensor) -> Tensor:
    """Where a mask hides a key: a boolean one, or an additive one, whose lowest finite number marks it.

    A merge needs a true -inf there.
    """
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def rows_of(mask: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The rows of a mask [.., T or 1, n] that belong to the queries from ``start`` to ``stop`` (excluded)."""
    return mask if mask is None or mask.shape[2] == 1 else mask[:, :, start:stop]
