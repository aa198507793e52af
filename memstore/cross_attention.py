"""One layer's attention over an encoder, as an adapter describes it: where it stands and its plain linear maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from memstore.attention import Partial, absorb_keys, absorb_values, split_heads
from memstore.errors import UnsupportedModelError


class LinearMap(Protocol):
    """x -> x W^T + b, as nn.Linear has it: weight [out, in], bias [out] or None. Asked anew at each use."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


def plain_linear(module: nn.Module, owner: nn.Module) -> nn.Linear:
    """``module`` as the plain linear map that absorbed projections need, else UnsupportedModelError."""
    if type(module) is not nn.Linear:
        raise UnsupportedModelError(
            f"{type(owner).__name__} projects with {type(module).__name__}; absorbing needs a plain nn.Linear."
        )
    return module


@dataclass(frozen=True)
class CrossAttention:
    """One decoder layer's attention over the encoder.

    num_kv_heads: key-value heads, shared by groups of heads; None if every head has its own. softcap: scores s become
    softcap · tanh(s / softcap) before the softmax; None if they stay as they are. through: the map that encoder states
    [d] pass on their way to this decoder's width [e], in which case key and value take those; None if they pass none.
    """

    module: nn.Module
    layer_idx: int
    num_heads: int
    key: LinearMap
    value: LinearMap
    num_kv_heads: int | None = None
    softcap: float | None = None
    through: LinearMap | None = None

    @property
    def width(self) -> int:
        """d, the width of the encoder states."""
        return int((self.through or self.key).weight.shape[1])

    def absorb(self, query: Tensor, scaling: float) -> Tensor:
        """Scaled queries [B, H, T, c] in the space of the encoder states [B, H, T, d], float32."""
        absorbed = absorb_keys(query, self._by_head(self.key.weight)) * scaling
        return absorbed if self.through is None else absorbed @ self.through.weight.float()

    def key_bias(self, query: Tensor, scaling: float) -> Tensor | None:
        """[B, H, T, 1]: what biases add to every score of these queries [B, H, T, c]; None without a bias."""
        bias = self.key.bias
        if self.through is not None and self.through.bias is not None:
            passed = self.key.weight @ self.through.bias
            bias = passed if bias is None else passed + bias
        if bias is None:
            return None
        return query.float() @ self._by_head(bias).float()[..., None] * scaling

    def values(self, part: Partial) -> Partial:
        """A weighted sum of encoder states [B, H, T, d] as one of values [B, H, T, c]."""
        if self.through is not None:
            o = part.o @ self.through.weight.float().T
            o = o if self.through.bias is None else o + part.l * self.through.bias.float()
            part = part._replace(o=o)
        bias = self.value.bias
        return absorb_values(part, self._by_head(self.value.weight), None if bias is None else self._by_head(bias))

    def _by_head(self, weight: Tensor) -> Tensor:
        """[H, c, …]: a view, unless groups of heads share it."""
        groups = self.num_kv_heads or self.num_heads
        split = split_heads(weight, groups)
        return split if groups == self.num_heads else split.repeat_interleave(self.num_heads // groups, dim=0)
