"""Running a model as the fingerprint knows it: nothing random, nothing learned, nothing of another precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout, gradients and autocast, which the fingerprint does not know; and back to how the model was."""
    training = [module for module in model.modules() if module.training]  # a part may be frozen in evaluation mode
    model.eval()
    try:
        with torch.no_grad(), without_autocast(model.device.type):
            yield
    finally:
        for module in training:
            module.training = True


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Inside, every operation on such a device computes in the dtype of its inputs."""
    available = torch.amp.autocast_mode.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else nullcontext()
