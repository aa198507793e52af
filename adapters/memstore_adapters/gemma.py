"""Gemma 2 and the text models of Gemma 3: sliding layers among global ones, soft-capped scores, two rotary bases."""

from __future__ import annotations

from transformers import PreTrainedModel

from memstore.errors import UnsupportedModelError
from memstore.hooks import base_implementation
from memstore_adapters.llama import LlamaAdapter


class GemmaAdapter(LlamaAdapter):
    """Gemma 2 caps its scores, which only eager attention does; Gemma 3 norms queries and keys in place of that."""

    model_types = ("gemma2", "gemma3_text")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if getattr(model.config, "use_bidirectional_attention", None):
            raise UnsupportedModelError(
                f"{type(model).__name__} sees what follows a token too (use_bidirectional_attention), so what it makes "
                "of a document would depend on the prompt behind it."
            )
        capped = model.config.model_type == "gemma2" and model.config.attn_logit_softcapping is not None
        implementation = base_implementation(self.self_attentions[0])
        if capped and implementation != "eager":
            raise UnsupportedModelError(
                f"{type(model).__name__} caps its attention scores, which {implementation!r} attention does not do; "
                'call model.set_attn_implementation("eager") first.'
            )
