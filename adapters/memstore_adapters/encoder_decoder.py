"""Encoder-decoders composed of an encoder and a decoder that were models of their own, such as BERT and GPT-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from memstore.cross_attention import CrossAttention, LinearMap, plain_linear
from memstore.errors import UnsupportedModelError
from memstore.families import EncoderDecoderAdapter

# Decoders whose cross-attention follows AttentionInterface over plain linear maps, by where it stands in a layer.
STANDING = {
    "crossattention.self": (
        *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta"),
        *("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    ),
    "crossattention": ("gpt2",),
    "encoder_attn": ("bart", "mbart"),
}
DECODERS = {model_type: place for place, model_types in STANDING.items() for model_type in model_types}


@dataclass(frozen=True)
class HalfOfConv1D:
    """The first or second half of GPT-2's map to keys and values, which holds both and is transposed."""

    conv: Conv1D
    half: int

    @property
    def weight(self) -> Tensor:
        return self.conv.weight.chunk(2, dim=1)[self.half].T

    @property
    def bias(self) -> Tensor:
        return self.conv.bias.chunk(2)[self.half]


class ComposedAdapter(EncoderDecoderAdapter):
    """A memory holds the encoder's own states. Where the decoder is of another width, they pass a map on their way."""

    model_types = ("encoder-decoder",)

    @property
    def native_window(self) -> int:
        return self.max_window or 512

    @property
    def max_window(self) -> int | None:
        return _positions(self.encoder)

    @property
    def max_target(self) -> int | None:
        return _positions(self.decoder)

    @property
    def decoder(self) -> nn.Module:
        return cast(nn.Module, self.model.decoder)

    def cross_attentions(self) -> list[CrossAttention]:
        between = getattr(self.model, "enc_to_dec_proj", None)
        through = None if between is None else plain_linear(between, self.model)
        return [
            CrossAttention(module, layer_idx, num_heads, key, value, through=through)
            for layer_idx, (module, num_heads, key, value) in enumerate(self._attentions())
        ]

    def _attentions(self) -> Iterator[tuple[nn.Module, int, LinearMap, LinearMap]]:
        """Each cross-attention with its number of heads and its maps to keys and values."""
        model_type = cast(Any, self.decoder.config).model_type
        if model_type not in DECODERS:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has a decoder of model_type {model_type!r}, whose cross-attention does "
                "not follow AttentionInterface over plain linear maps. Decoders that can read: "
                f"{', '.join(DECODERS)}."
            )
        for name, module in self.decoder.named_modules():
            if f".{name}".endswith(f".{DECODERS[model_type]}"):
                yield module, *_maps(cast(Any, module))


def _maps(module: Any) -> tuple[int, LinearMap, LinearMap]:
    if hasattr(module, "k_proj"):
        return module.num_heads, plain_linear(module.k_proj, module), plain_linear(module.v_proj, module)
    if hasattr(module, "key"):
        return module.num_attention_heads, plain_linear(module.key, module), plain_linear(module.value, module)
    if type(module.c_attn) is not Conv1D:
        plain_linear(module.c_attn, module)  # which refuses it
    return module.num_heads, HalfOfConv1D(module.c_attn, 0), HalfOfConv1D(module.c_attn, 1)


def _positions(part: nn.Module) -> int | None:
    """Tokens for which a part has positions: RoBERTa and its kin leave out those up to that of padding."""
    for name, module in part.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return cast("int | None", getattr(part.config, "max_position_embeddings", None))
