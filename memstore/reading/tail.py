"""The tail: how much of the attention over a memory lies on the keys that were not read."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def known_share(chosen: Tensor, log_sums: Sequence[Tensor]) -> Tensor:
    """[m]: the share of what was read, from the scores [m, k] that the index gave it and the log sums [m] over all keys
    of each memory. Both are rounded alike, so that a shift of all scores cancels."""
    return torch.exp(torch.logsumexp(chosen, dim=1) - _together(log_sums)).clamp_max(1)


def bounded_share(log_read: Tensor, bounds: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """[m] twice: the least and the greatest share of what was read, with log_read [m] the log of its sum of exp(score),
    and bounds of that sum over each memory."""
    lows, highs = zip(*bounds, strict=True)
    most, least = (torch.exp(log_read - torch.maximum(log_read, _together(sums))) for sums in (lows, highs))
    return least, most


def _together(log_sums: Sequence[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(list(log_sums)), dim=0)
