"""The truth about a search."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of a score, by the dtype it came from


class Truth:
    """The inner products of queries [m, d] and keys [n, d], with which the results of a search are compared.

    tolerance: how wrong a score may be beyond rounding, as a share of |query| · max |key|.
    """

    def __init__(self, keys: Tensor, queries: Tensor, tolerance: float = 0) -> None:
        relative = tolerance + max(ROUNDING[keys.dtype], ROUNDING[queries.dtype])
        keys, queries = keys.double().cpu(), queries.double().cpu()
        self.scores = queries @ keys.T
        self.slack = relative * keys.norm(dim=1).max() * queries.norm(dim=1, keepdim=True)

    def check(self, found: tuple[Tensor, Tensor], k: int) -> None:
        """Whether scores and ids [m, k] are what a search may return; not whether they are the best."""
        scores, ids = found
        m, n = self.scores.shape
        assert scores.dtype == torch.float32, f"Scores are {scores.dtype}, and must be float32."
        assert ids.dtype == torch.int64, f"Ids are {ids.dtype}, and must be int64."
        shapes = tuple(scores.shape), tuple(ids.shape)
        assert shapes == ((m, k), (m, k)), f"{m} queries and k={k} gave scores and ids of shapes {shapes}."
        empty = ids == -1
        assert not (empty[:, :-1] & ~empty[:, 1:]).any(), f"k={k}: an empty slot (id -1) stands before a key."
        assert scores[empty].isneginf().all(), f"k={k}: an empty slot (id -1) has a score other than -inf."
        assert empty[:, n:].all(), f"k={k}: there are more results than the {n} keys."
        assert ((ids >= 0) & (ids < n) | empty).all(), f"k={k}: an id is none of the {n} keys' 0 to {n - 1}, nor -1."
        in_order = ids.sort(dim=1).values
        repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        assert not repeated.any(), f"k={k}: a key was found twice for one query."
        assert not (scores[:, 1:] > scores[:, :-1]).any(), f"k={k}: a better score stands behind a worse one."
        wrong = (self._of(ids) - scores.double().cpu()).abs().masked_fill(empty.cpu(), 0)
        assert (wrong <= self.slack).all(), (
            f"k={k}: scores differ from the inner products of their keys by up to {wrong.max():.3g}; "
            f"{float(self.slack[wrong.argmax() // k]):.3g} is allowed."
        )

    def recall(self, ids: Tensor, k: int) -> float:
        """The share of the best ``k`` keys that is among ids [m, k]; as good a key, up to rounding, is as good."""
        k = min(k, self.scores.shape[1])
        worst = self.scores.topk(k).values[:, -1:]
        good = (self._of(ids[:, :k]) >= worst - self.slack) & (ids[:, :k].cpu() >= 0)
        return float(good.double().mean())

    def _of(self, ids: Tensor) -> Tensor:
        return self.scores.gather(1, ids.cpu().clamp_min(0))
