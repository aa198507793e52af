"""What the kit of adapters does with a model, here and in another process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

import memstore
from memstore.interfaces import ModelAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from memstore.attachment import Attachment


class Stop(Exception):  # noqa: N818 - no error
    """Leaves an attachment."""


@contextmanager
def in_use(adapter: type[ModelAdapter]) -> Iterator[None]:
    """Let memstore take this adapter for any model."""
    with (
        patch("memstore.encode.adapter_for", lambda model: adapter),
        patch("memstore.attaching.adapter_for", lambda model: adapter),
    ):
        yield


def shake(tensors: list[Tensor]) -> None:
    """Change all floating-point numbers in place."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))


def logits_of(output: Any) -> Tensor:
    assert isinstance(output.logits, Tensor), "The model must have a head that gives logits."
    return output.logits


def logits(model: PreTrainedModel, attached: Attachment, prompt: Mapping[str, Tensor]) -> Tensor:
    """What the model answers to the prompt while a memory is attached, and nothing else to read."""
    inputs: dict[str, Any] = dict(prompt)
    if model.config.is_encoder_decoder:
        inputs["encoder_outputs"] = attached.empty_prompt()
    with torch.no_grad():
        return logits_of(model(**inputs))


def read_memory(
    adapter: type[ModelAdapter],
    model: PreTrainedModel,
    path: Path,
    options: Mapping[str, Any],
    prompt: Mapping[str, Tensor],
) -> Tensor:
    with (
        in_use(adapter),
        memstore.open(path, "r") as library,
        memstore.attach(model, library["doc"], **options) as attached,
    ):
        return logits(model, attached, prompt)
