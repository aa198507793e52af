"""What readers of all kinds ask of a forward pass and give back to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from inspect import signature
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from memstore.errors import AttachError


@dataclass
class EncoderStates(BaseModelOutput):
    """Encoder outputs for any family: models with experts ask theirs how the tokens were routed, and take None."""

    router_logits: tuple[Tensor, ...] | None = None


def checked_layers(layers: Collection[int] | None, depth: int) -> frozenset[int]:
    """The layers that read, None standing for all of ``depth``. Raises AttachError for none, and for one too many."""
    every = range(depth)
    if layers is None:
        return frozenset(every)
    if (
        not isinstance(layers, Collection)
        or not len(layers)  # an array of numbers has no truth value
        or not all(type(layer) is int and layer in every for layer in layers)
    ):
        raise AttachError(f"layers={layers!r} must list some of this decoder's layers, which are 0 to {depth - 1}.")
    return frozenset(layers)


def finish(output: Tensor, like: Tensor) -> Tensor:
    """Attention output [B, H, T, c] as an attention function returns it: [B, T, H, c] in the model's dtype."""
    return output.transpose(1, 2).to(like.dtype).contiguous()


def find_cache(values: Any) -> Any | None:
    """The transformers cache among these values, whatever its argument is called."""
    return next((value for value in values if isinstance(value, Cache)), None)


def by_name(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """The positional arguments of a module's forward pass by their names, as far as it has names for them."""
    parameters = signature(module.forward).parameters.values()
    names = [each.name for each in takewhile(lambda each: each.kind is each.POSITIONAL_OR_KEYWORD, parameters)]
    return dict(zip(names, args, strict=False))


def cache_name(module: nn.Module) -> str:
    """What the argument is called by which this decoder takes a cache."""
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
