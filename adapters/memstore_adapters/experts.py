"""Mixtures of experts: SwitchTransformers, whose attention is T5's, and NLLB-MoE, whose attention is BART's.

An expert takes only so many tokens. In some versions of transformers all tokens of a batch compete for these places, so
that what becomes of a window depends on the windows read beside it: here every window is read alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.errors import UnsupportedModelError
from memstore_adapters.bart import BartAdapter
from memstore_adapters.t5 import T5Adapter

Parts = dict[str, Tensor]


class SwitchTransformersAdapter(T5Adapter):
    """T5 with experts in some of its layers."""

    model_types = ("switch_transformers",)

    def encode(self, windows: Tensor) -> Parts:
        return one_by_one(super().encode, windows)

    def weights(self) -> Parts:
        return routed(super().weights(), self.model)


class NllbMoeAdapter(BartAdapter):
    """NLLB with experts in some of its layers."""

    model_types = ("nllb-moe",)
    name = "cross_attention"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if model.config.second_expert_policy != "all":
            raise UnsupportedModelError(
                f"{type(model).__name__} draws the second expert of a token by lot (second_expert_policy="
                f'{model.config.second_expert_policy!r}), so no document is read twice alike. Set it to "all".'
            )

    def encode(self, windows: Tensor) -> Parts:
        return one_by_one(super().encode, windows)

    def weights(self) -> Parts:
        return routed(super().weights(), self.model)


def one_by_one(encode: Callable[[Tensor], Parts], windows: Tensor) -> Parts:
    """What ``encode`` makes of each window alone, joined."""
    alone = [encode(window) for window in windows.split(1)]
    return {part: torch.cat([each[part] for each in alone]) for part in alone[0]}


def routed(weights: Parts, model: PreTrainedModel) -> Parts:
    """The weights with those of routers in the dtype that a router converts its own to when it is first used: else a
    model would not be the one that it was before."""
    dtype = getattr(torch, model.config.router_dtype)
    return {name: tensor.to(dtype) if ".router." in name else tensor for name, tensor in weights.items()}
