"""BigBirdPegasus: its encoder changes its attention for good when a text is too short, which must not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memstore_adapters.bart import BartAdapter


class BigBirdPegasusAdapter(BartAdapter):
    """The decoder attends as BART's does.

    Block-sparse attention needs a text of more than a few blocks. Given less, the encoder turns to full attention and
    stays with it, so that what it makes of a document depends on what it has read before. Here each window is read with
    the attention that its length allows, and then the encoder is as it was. ``attention_type``, ``block_size`` and
    ``num_random_blocks`` decide which that is, and are in the fingerprint with the rest of the configuration.
    """

    model_types = ("bigbird_pegasus",)

    def encode(self, windows: Tensor) -> dict[str, Tensor]:
        config = self.model.config
        least = (5 + 2 * config.num_random_blocks) * config.block_size
        with attending(self.encoder, config.attention_type if windows.shape[1] > least else "original_full"):
            return super().encode(windows)


@contextmanager
def attending(encoder: Any, attention_type: str) -> Iterator[None]:
    """Inside, the encoder attends in this way; then as before."""
    before = encoder.attention_type
    _switch(encoder, attention_type)
    try:
        yield
    finally:
        _switch(encoder, before)


def _switch(encoder: Any, attention_type: str) -> None:
    # The encoder makes new attention layers and puts its own weights into them: those it makes need no memory, and must
    # draw no random numbers.
    with torch.device("meta"):
        encoder.set_attention_type(attention_type)
