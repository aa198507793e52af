"""Whisper: a window is one 30-second spectrogram, and a memory is the states of as many as were given."""

from __future__ import annotations

from torch import Tensor

from memstore.errors import DocumentError
from memstore.manifest import WindowRule
from memstore_adapters.bart import BartAdapter


class WhisperAdapter(BartAdapter):
    """The decoder attends as BART's does; the encoder reads spectrograms."""

    model_types = ("whisper",)

    @property
    def native_window(self) -> int:
        return int(self.model.config.max_source_positions)

    vocab_size = 0  # of what the encoder reads

    def rule(self, window: int | None, overlap: int | None) -> WindowRule:
        return super().rule(window, 0 if overlap is None else overlap)

    def feature_windows(self, features: Tensor) -> tuple[Tensor, int]:
        """features: [windows, mels, frames], each two frames per state and exactly one encoder input long."""
        mels, frames = self.model.config.num_mel_bins, 2 * self.native_window
        if features.dim() != 3 or not len(features) or features.shape[1:] != (mels, frames):
            raise DocumentError(
                f"input_features has shape {list(features.shape)}; this model reads [windows, {mels}, {frames}], "
                "which its feature extractor makes of 30 seconds of sound."
            )
        return features.to(self.model.dtype), self.native_window
