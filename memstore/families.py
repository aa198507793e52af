"""The two shapes of model that adapters describe: encoder-decoders and decoder-only models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memstore.cross_attention import CrossAttention
from memstore.errors import AttachError, ConfigError, UnsupportedModelError
from memstore.hooks import Given, tapped
from memstore.interfaces import ModelAdapter
from memstore.manifest import CODED_BITS, PartSpec, WindowRule
from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.reading.asking import reading_queries, written_queries
from memstore.reading.chat import chat_frame
from memstore.reading.hidden import HiddenAttachment
from memstore.reading.kv import KvAttachment
from memstore.reading.rotary import frequencies, frozen, is_changing, rope_types, unrotate
from memstore.reading.selection import BLOCK, bounds


def checked_rule(window: int, overlap: int | None, context: str, limit: int | None) -> WindowRule:
    """A window rule, or ConfigError if it does not fit a model that reads at most ``limit`` tokens at once.

    overlap: None stands for one half of the window.
    """
    for key, value in (("window", window), ("overlap", 0 if overlap is None else overlap)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key}={value!r} must be a whole number of tokens.")
    if window < 1 or (limit is not None and window > limit):
        raise ConfigError(f"window={window} does not fit this model, which reads 1 to {limit or 'any'} tokens at once.")
    overlap = window // 2 if overlap is None else overlap
    if not 0 <= overlap < window:
        raise ConfigError(f"overlap={overlap} must be at least 0 and less than the window of {window} tokens.")
    return WindowRule.model_validate({"window": window, "overlap": overlap, "context": context})


def known_options(attachment: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options, if this kind of attachment has all of them, else AttachError."""
    known = [name for name, each in signature(attachment).parameters.items() if each.kind is each.KEYWORD_ONLY]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise AttachError(f"{', '.join(unknown)}: no option of this kind of memory, which has {', '.join(known)}.")
    return options


class EncoderDecoderAdapter(ModelAdapter):
    """An encoder-decoder: a memory holds one encoder state per token, and cross-attention reads it."""

    kind = "hidden"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if not model.config.is_encoder_decoder or model.get_encoder() is model:
            raise UnsupportedModelError(
                f"{type(model).__name__} is only a part of an encoder-decoder; load the whole model, for example with "
                "AutoModelForSeq2SeqLM."
            )

    @abstractmethod
    def cross_attentions(self) -> list[CrossAttention]:
        """The decoder's cross-attention, layer by layer."""

    @property
    def max_window(self) -> int | None:
        """Tokens the encoder can read at once; None where positions set no limit."""
        return self.native_window

    @property
    def max_target(self) -> int | None:
        """Tokens the decoder can write, its start included; None where positions set no limit."""
        return cast("int | None", getattr(self.model.config, "max_target_positions", self.max_window))

    @property
    def encoder(self) -> nn.Module:
        return cast(nn.Module, self.model.get_encoder())

    @property
    def width(self) -> int:
        """d, the width of an encoder state."""
        return self.cross_attentions()[0].width

    def rule(self, window: int | None, overlap: int | None) -> WindowRule:
        """Windows overlap by one half and the middle half is kept, as in Unlimiformer, section 2.1."""
        return checked_rule(self.native_window if window is None else window, overlap, "both", self.max_window)

    def parts(self, dtype: str) -> dict[str, PartSpec]:
        return {"hidden": PartSpec.model_validate({"shape": (self.width,), "dtype": dtype})}

    def encode(self, windows: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.encoder(windows).last_hidden_state}

    def weights(self) -> dict[str, Tensor]:
        return dict(self.encoder.state_dict())

    def attachment(self, rows: Sequence[Sequence[Memory]], **options: Any) -> HiddenAttachment:
        return HiddenAttachment(self, rows, **known_options(HiddenAttachment, options))

    def queries(self, opened: OpenMemory) -> dict[int, Tensor]:
        return written_queries(self, opened)


class DecoderOnlyAdapter(ModelAdapter):
    """A decoder: a memory holds every layer's keys, before rotation, and values.

    Rotary frequencies that change with the length of a text ("dynamic", "longrope") are frozen: while a document is
    encoded and while memories are attached, they are those that hold inside the original window, which is then also
    the model's native window. The fingerprint has these, whatever the model has read before.
    """

    kind = "kv"

    DEFAULT_WINDOW: ClassVar[int] = 1024

    @property
    @abstractmethod
    def decoder(self) -> PreTrainedModel:
        """The model without its head: what embeds tokens and runs the layers."""

    @property
    @abstractmethod
    def self_attentions(self) -> list[nn.Module]:
        """Self-attention, layer by layer."""

    @property
    @abstractmethod
    def rotary(self) -> nn.Module | None:
        """The module that makes (cos, sin) from position ids; None if no layer has rotary positions."""

    def rope_of(self, layer: int) -> str | None:
        """The name of a layer's rotary frequencies: "" if the model has one set of them, else the kind of layer that
        has its own; None for a layer without rotary positions."""
        if self.rotary is None:
            return None
        return cast(str, self.model.config.layer_types[layer]) if "" not in rope_types(self.rotary) else ""

    def rotary_at(self, layer: int, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, r] of positions [B, T] at one layer, with the dtype and device of ``like``.

        The first r channels of queries and keys are rotary: none of a layer without rotary positions.
        """
        name = self.rope_of(layer)
        if name is None:
            return (like.new_empty(*positions.shape, 0),) * 2
        cos, sin = cast(nn.Module, self.rotary)(like, positions, **({"layer_type": name} if name else {}))
        return cos, sin

    def sliding_window(self, layer: int) -> int | None:
        """How many tokens a layer sees, the asking one included; None if it sees all."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and kinds[layer] != "sliding_attention":
            return None
        return cast("int | None", getattr(config, "sliding_window", None))

    def held(self) -> AbstractContextManager[None]:
        return nullcontext() if self.rotary is None else frozen(self.rotary)

    @property
    def native_window(self) -> int:
        config = self.model.config
        ropes = getattr(config, "rope_parameters", None) or {}
        each = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
        original = [
            rope.get("original_max_position_embeddings") for rope in each if is_changing(str(rope.get("rope_type")))
        ]
        return int(min(positions for positions in (config.max_position_embeddings, *original) if positions))

    @property
    def num_kv_heads(self) -> int:
        return int(self.model.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        return int(cast(int, self.self_attentions[0].head_dim))

    def rule(self, window: int | None, overlap: int | None) -> WindowRule:
        """Windows step by one half; a token is kept from the window in which at least half lies to its left."""
        default = self.native_window if self.whole_only else min(self.DEFAULT_WINDOW, self.native_window // 2)
        return checked_rule(default if window is None else window, overlap, "left", self.native_window)

    def parts(self, dtype: str) -> dict[str, PartSpec]:
        """Where they are coded, keys have scales for channels, and values for tokens; bounds never are."""
        common, coded = {"shape": (self.num_kv_heads, self.head_dim), "dtype": dtype}, dtype in CODED_BITS
        specs = {
            part: PartSpec.model_validate(common | {"scales": scales if coded else None})
            for part, scales in (("keys", "channel"), ("values", "token"))
        }
        of_block = {"shape": (2, *specs["keys"].shape), "dtype": "bfloat16" if coded else dtype, "every": BLOCK}
        specs["bounds"] = PartSpec.model_validate(of_block)
        return {f"{part}.{layer}": spec for layer in range(len(self.self_attentions)) for part, spec in specs.items()}

    def summaries(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``bounds``: the least and the largest number of every channel of a block's keys, [blocks, 2, G, c]."""
        return {part.replace("keys", "bounds"): bounds(keys) for part, keys in rows.items() if part.startswith("keys")}

    def encode(self, windows: Tensor) -> dict[str, Tensor]:
        """One forward pass; keys and values are taken where attention sees them, keys with their rotation undone."""
        taken: dict[str, Tensor] = {}

        def note(layer: int, given: Given) -> None:
            plain = unrotate(given.key, *self.rotary_at(layer, given.key, positions))
            taken[f"keys.{layer}"], taken[f"values.{layer}"] = plain.transpose(1, 2), given.value.transpose(1, 2)

        positions = torch.arange(windows.shape[1], device=windows.device)[None]
        with self.held(), tapped(self.self_attentions, note):
            self.decoder(input_ids=windows, use_cache=False)
        return taken

    def prefix(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """What stands before the user's words in a chat. Every window of a long document is read behind it: so its own
        first tokens do not become the attention sink, and what is kept was read as what a user gave."""
        return chat_frame(tokenizer).header

    def closing(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """What stands behind the user's words in a chat: the words of the template, which many texts know too."""
        try:
            after = chat_frame(tokenizer).after
        except ConfigError:  # a document of one window needs no frame
            return []
        return list(tokenizer(after, add_special_tokens=False)["input_ids"])

    def rope(self) -> Tensor | None:
        return None if self.rotary is None else frequencies(self.rotary)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.decoder.state_dict())

    def attachment(self, rows: Sequence[Sequence[Memory]], **options: Any) -> KvAttachment:
        return KvAttachment(self, rows, **known_options(KvAttachment, options))

    def queries(self, opened: OpenMemory) -> dict[int, Tensor]:
        return reading_queries(self, opened)
