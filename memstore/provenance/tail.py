"""The tail: how much of the attention over a memory lies on the keys that were not read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention import Scoring

GROUP = 256  # successive rows of a memory that are bounded together
AT_ONCE = 16  # groups converted at once


class Outline:
    """The middle of each group of a memory's rows and how far a row lies from it: what bounds the sum of exp(score).

    means [g, d] and radii [g] are float32, sizes [g] the rows of each group. Built by one pass over blocks [n_i, d].
    """

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        means, radii, sizes = [], [], []
        for block in blocks:
            for piece in block.split(GROUP * AT_ONCE):
                whole = len(piece) // GROUP * GROUP
                rows = piece.float()
                for groups in (rows[:whole].view(-1, GROUP, rows.shape[1]), rows[None, whole:]):
                    if groups.numel():
                        middle = groups.mean(1, keepdim=True)
                        means.append(middle.squeeze(1))
                        radii.append((groups - middle).norm(dim=2).amax(1))
                        sizes.append(radii[-1].new_full(radii[-1].shape, groups.shape[1]))
        self.means, self.radii, self.sizes = torch.cat(means), torch.cat(radii), torch.cat(sizes)

    def log_sums(self, queries: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Bounds [m] of the log of the sum of exp(score) over all rows, for scaled queries [m, d].

        With a group's mean u and radius r, a score lies within |q| r of q·u, and these differences add up to 0. So by
        the convexity of exp the group's n rows have at least n exp(q·u), and at most n exp(q·u) cosh(|q| r). A soft
        cap leaves no more than its monotony: there every score is bounded for itself.
        """
        middle, reach = queries @ self.means.T, queries.norm(dim=1, keepdim=True) * self.radii
        if scoring.softcap is None:
            low = scoring(middle)
            high = low + reach + torch.log1p(torch.exp(-2 * reach)) - math.log(2)
        else:
            low, high = scoring(middle - reach), scoring(middle + reach)
        sizes = self.sizes.log()
        return torch.logsumexp(low + sizes, dim=1), torch.logsumexp(high + sizes, dim=1)


class Tail(NamedTuple):
    """What is known in one layer, at the last T' positions, of the attention over all keys beside those that were read.

    log_read: [b, H, T'], the log of the sum of exp(score) over what was read. log_sum: the same over all keys, where
    the index gave it, by its own scores, as is log_read then: both are rounded alike, so a shift of all cancels.
    Else outlines of the memories, and the queries [b, H, T', d], bound it.
    """

    log_read: Tensor
    log_sum: Tensor | None
    outlines: Sequence[Outline]
    queries: Tensor
    scoring: Scoring


def shares(tails: Sequence[Tail]) -> tuple[Tensor, Tensor]:
    """Bounds [L, b, H, T'] of the share that what was read holds in each of L layers, all reckoned together."""
    read = torch.stack([tail.log_read for tail in tails])
    first = tails[0]
    if first.log_sum is not None:
        share = torch.exp(read - torch.stack([tail.log_sum for tail in tails if tail.log_sum is not None])).clamp_max(1)
        return share, share
    queries = torch.stack([tail.queries for tail in tails])
    biases = [tail.scoring.bias for tail in tails if tail.scoring.bias is not None]
    scoring = first.scoring._replace(bias=torch.stack(biases).flatten(0, 3) if biases else None)
    bounds = [outline.log_sums(queries.flatten(0, 3), scoring) for outline in first.outlines]
    sums = (
        bounds[0] if len(bounds) == 1 else [torch.logsumexp(torch.stack(each), 0) for each in zip(*bounds, strict=True)]
    )
    high, low = (torch.exp(read - torch.maximum(read, each.view(read.shape))) for each in sums)
    return low, high
