"""Speech2Text: a window is a spectrogram of any one length, and a memory holds a state for every few of its frames."""

from __future__ import annotations

from torch import Tensor

from memstore.errors import DocumentError
from memstore_adapters.whisper import WhisperAdapter


class Speech2TextAdapter(WhisperAdapter):
    """The decoder attends as BART's does; the encoder halves a spectrogram by each of its convolutions."""

    model_types = ("speech_to_text",)

    @property
    def native_window(self) -> int:
        return self._states(int(self.model.config.max_source_positions))

    def feature_windows(self, features: Tensor) -> tuple[Tensor, int]:
        """features: [windows, frames, channels], as its feature extractor makes them."""
        config = self.model.config
        channels, most = config.input_feat_per_channel * config.input_channels, config.max_source_positions
        fits = features.dim() == 3 and len(features) and features.shape[2] == channels
        if not fits or not 0 < features.shape[1] <= most:
            raise DocumentError(
                f"input_features has shape {list(features.shape)}; this model reads [windows, frames, {channels}] "
                f"of at most {most} frames. Cut a longer recording into windows of one length."
            )
        return features.to(self.model.dtype), self._states(features.shape[1])

    def _states(self, frames: int) -> int:
        for size in self.model.config.conv_kernel_sizes:
            frames = (frames + 2 * (size // 2) - size) // 2 + 1
        return frames
