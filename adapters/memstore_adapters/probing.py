"""Finding the cross-attention of an unknown model by running it: what makes keys and values of the states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memstore.errors import UnsupportedModelError
from memstore.hooks import Given, tapped
from memstore.reading.passes import EncoderStates


@dataclass(frozen=True)
class Found:
    """A cross-attention and its maps to keys and values, by their names in the model."""

    module: str
    key: str
    value: str
    num_heads: int
    num_kv_heads: int
    softcap: float | None


def logits(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """What a model returns: its logits, or the decoder's states if it has no head."""
    output: Any = model(**inputs)
    found: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return found


def find(model: PreTrainedModel, states: Tensor, answer: Tensor) -> list[Found]:
    """Each cross-attention, in the order in which they run, of a model that reads encoder states [1, n, d].

    Raises UnsupportedModelError unless all that is made of the states are keys and values of attention functions, and
    each of them is what one nn.Linear made of the states, untouched but for its division into heads.
    """
    calls: list[tuple[str, Given]] = []
    able = {name: module for name, module in model.named_modules() if _has_implementation(module)}
    names = list(able)
    with (
        _linear_maps_fed(model, states) as fed,
        tapped(list(able.values()), lambda i, given: calls.append((names[i], given))),
    ):
        logits(model, encoder_outputs=EncoderStates(last_hidden_state=states), decoder_input_ids=answer)
    if not fed:
        raise UnsupportedModelError("no nn.Linear of its decoder is given the encoder's states as they are")

    def made(heads: Tensor) -> str | None:
        rows = heads.transpose(1, 2).flatten(2)[0]  # [n, G · c]
        return next((name for name, output in fed.items() if torch.equal(output, rows)), None)

    found: dict[str, Found] = {}
    for module, given in calls:
        key, value = made(given.key), made(given.value)
        if key is not None and value is not None:
            one = Found(module, key, value, given.query.shape[1], given.key.shape[1], given.softcap)
            if found.setdefault(module, one) != one:
                raise UnsupportedModelError(f"{module} does not attend alike each time it is called")
    unused = fed.keys() - {name for each in found.values() for name in (each.key, each.value)}
    if unused:
        raise UnsupportedModelError(
            f"what {min(unused)} makes of the encoder's states is not what an attention function is given as keys or "
            "values (it is normed, rotated or joined with others first, or attention does not follow "
            "AttentionInterface)"
        )
    return list(found.values())


@contextmanager
def _linear_maps_fed(model: PreTrainedModel, states: Tensor) -> Iterator[dict[str, Tensor]]:
    """What each nn.Linear that is given these states makes of them, [n, e] by its name, for each run inside."""
    fed: dict[str, Tensor] = {}

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        given = args[0] if args else None
        if (
            isinstance(given, Tensor)
            and given.shape[-1:] == states.shape[-1:]
            and given.numel() == states.numel()
            and torch.equal(given.reshape(states.shape), states)
        ):
            fed[name] = output.reshape(states.shape[1], -1)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_hook(partial(hook, name)).remove)
        yield fed


def _has_implementation(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) is not None
