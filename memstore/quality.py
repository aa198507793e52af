"""What a search loses: an index held against exact search, by queries that a decoder really asks.

Notation: m queries of width d, n keys [n, d] with values [n, v], both in the same blocks; k rows are searched for each
query. Queries are scaled: their inner products with the keys are the scores of the softmax. All in float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, computed_field
from torch import Tensor

from memstore.attention import QUERY_CHUNK, ROW_CHUNK, Partial, normalise, nothing_read, shifted_exp, with_more
from memstore.interfaces import VectorIndex
from memstore.vectors import Rows, best_so_far

RUNS = 5  # of which the median counts
TIMED = 64  # queries of a run
TOGETHER = 128  # queries for which keys are gathered together
EQUAL = 1e-6  # of the largest possible score: what float32 cannot tell apart


class Quality(BaseModel):
    """How good a search is, the mean over its queries.

    recall: share of the exact top k that was found, where equal scores count as found. mass: share of the softmax over
    all keys that the keys found hold. exact_mass: what the exact top k hold of it. error: distance of the attention
    over the keys found from the attention over the exact top k, as a share of the latter's norm. error_to_all: the same
    against attention over all keys. wall_us, cpu_us: microseconds a query takes, in a batch.
    """

    model_config = ConfigDict(frozen=True)

    num_queries: int
    recall: float
    mass: float
    exact_mass: float
    error: float
    error_to_all: float
    wall_us: float
    cpu_us: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kept(self) -> float:
        """What of the mass that exact search captures this one captures too."""
        return min(1.0, self.mass / self.exact_mass)


def mean(qualities: Sequence[Quality]) -> Quality:
    """The quality over the queries of all."""
    total = sum(each.num_queries for each in qualities)
    fields = [name for name in Quality.model_fields if name != "num_queries"]
    sums = {name: sum(getattr(each, name) * each.num_queries for each in qualities) / total for name in fields}
    return Quality(num_queries=total, **sums)


class Exact(NamedTuple):
    """What exact search finds for each query. Shapes: output_all and output [m, v], all others [m].

    log_sum: log of the sum of exp(score) over all keys. threshold: a score from which on a key is among the best k.
    mass, output: those of the best k. output_all: attention over all keys.
    """

    log_sum: Tensor
    threshold: Tensor
    mass: Tensor
    output: Tensor
    output_all: Tensor


def exact(keys: Sequence[Tensor], values: Sequence[Tensor], queries: Tensor, k: int) -> Exact:
    """Search exactly: one pass over keys [n_i, d] and values [n_i, v] for queries [m, d], on the queries' device."""
    chunks = queries.float().split(QUERY_CHUNK)
    parts = [nothing_read(chunk, values[0].shape[1]) for chunk in chunks]
    best = [(chunk.new_empty(len(chunk), 0), chunk.new_empty(len(chunk), 0, dtype=torch.long)) for chunk in chunks]
    longest, start = queries.new_zeros((), dtype=torch.float32), 0
    for block, block_values in zip(keys, values, strict=True):
        rows = block.to(queries.device, torch.float32)
        summed = rows if block_values is block else block_values.to(queries.device, torch.float32)
        longest = torch.maximum(longest, rows.norm(dim=1).amax())
        for i, chunk in enumerate(chunks):
            scores = chunk @ rows.T
            parts[i] = with_more(parts[i], scores, summed)
            best[i] = best_so_far(best[i], scores, start, k)
        start += len(block)
    everything = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    log_sum = (everything.m + everything.l.log()).squeeze(1)
    scores, ids = (torch.cat(tensors) for tensors in zip(*best, strict=True))
    threshold = scores.amin(1) - EQUAL * longest * queries.float().norm(dim=1)
    _, mass, output = _attend(keys, values, queries, ids, log_sum)
    return Exact(log_sum, threshold, mass, output, normalise(everything))


def measure(
    index: VectorIndex, keys: Sequence[Tensor], values: Sequence[Tensor], queries: Tensor, k: int, truth: Exact
) -> Quality:
    """Hold an index of the keys against ``truth``, which is what :func:`exact` gives for the same arguments."""
    found = _once(index.search(queries, k)[1])
    scores, mass, output = _attend(keys, values, queries, found, truth.log_sum)
    most = min(k, sum(map(len, keys)))
    hits = (scores >= truth.threshold[:, None]).sum(1).clamp_max(most)
    some = queries[:TIMED]
    wall, cpu = timed(lambda: index.search(some, k)[1], len(some))
    return Quality(
        num_queries=len(queries),
        recall=float(hits.float().mean()) / most,
        mass=float(mass.mean()),
        exact_mass=float(truth.mass.mean()),
        error=_error(output, truth.output),
        error_to_all=_error(output, truth.output_all),
        wall_us=wall,
        cpu_us=cpu,
    )


def _once(ids: Tensor) -> Tensor:
    """Ids [m, k], each at most once in a row: a key must not count twice. Empty slots are -1."""
    ordered = ids.sort(1).values
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(again, -1)


def _attend(
    keys: Sequence[Tensor], values: Sequence[Tensor], queries: Tensor, ids: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [m, k] of the keys with these ids, -inf where there is none; the mass [m] they hold; attention [m, v]."""
    at_once = max(1, min(TOGETHER, ROW_CHUNK // (ids.shape[1] * queries.shape[1])))
    split = (tensor.split(at_once) for tensor in (queries.float(), ids, log_sum))
    rows = Rows(keys)
    summed = rows if values is keys else Rows(values)
    parts = [_attend_together(rows, summed, *each) for each in zip(*split, strict=True)]
    scores, mass, output = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return scores, mass, output


def _attend_together(
    keys: Rows, values: Rows, queries: Tensor, ids: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a few queries: what any of them reads is gathered once, since they mostly share it."""
    found, read = ids.clamp_min(0), torch.zeros(keys.num_rows, dtype=torch.bool, device=ids.device)
    read[found] = True
    union, places = read.nonzero().squeeze(1), (read.cumsum(0) - 1)[found]
    rows = keys(union).float()
    summed = rows if values is keys else values(union).float()
    scores_of_all = queries @ rows.T
    scores = scores_of_all.gather(1, places).masked_fill(ids < 0, -torch.inf)
    m = scores.amax(-1, keepdim=True)
    weights = shifted_exp(scores, m)
    spread = torch.zeros_like(scores_of_all).scatter_add_(1, places, weights)
    part = Partial(m, weights.sum(-1, keepdim=True), spread @ summed)
    return scores, (part.l * shifted_exp(part.m, log_sum[:, None])).squeeze(1), normalise(part)


def _error(output: Tensor, reference: Tensor) -> float:
    """Distance of outputs [m, v] from reference, as a share of its norm: the mean over queries."""
    norm = reference.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((output - reference).norm(dim=1) / norm).mean())


def timed(ask: Callable[[], Tensor], queries: int) -> tuple[float, float]:
    """Microseconds of wall and of CPU time that each of the queries that are asked takes: medians over RUNS runs."""
    runs = []
    for _ in range(RUNS):
        wall, cpu = time.perf_counter(), time.process_time()
        ask().cpu()  # which waits for a GPU
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = (median(times) / queries * 1e6 for times in zip(*runs, strict=True))
    return wall, cpu
