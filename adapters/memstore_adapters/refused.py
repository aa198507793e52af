"""Families that no adapter serves, each with what in it prevents that."""

from __future__ import annotations

OWN_ATTENTION = "its attention does not follow transformers' AttentionInterface, so nothing can be attached to it"

NEIGHBOURS = "its rotary positions turn neighbouring channels, while a memory is turned by halves of them"
STATES = "some or all of its layers keep one state of all they have read, in which no single token can be found again"
LATENT = "only the end of its keys is rotary, and they are made of a latent state (MLA) that a memory does not hold"
PICTURES = "it reads images or sound beside text, which no memory holds yet"
ALIBI = (
    "the distance to a token lowers its score (ALiBi), and attention does not follow transformers' AttentionInterface"
)

REFUSED = {
    **dict.fromkeys(("cohere", "cohere2", "codegen", "ernie4_5", "glm", "glm4", "gptj", "helium"), NEIGHBOURS),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2"), STATES
    ),
    **dict.fromkeys(("nemotron_h", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), STATES),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3"), LATENT),
    **dict.fromkeys(("llama4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), PICTURES),
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    "gemma3": f"{PICTURES}; its text model alone (Gemma3ForCausalLM, model_type 'gemma3_text') is served",
    "gemma3n": "its last layers attend to keys and values of earlier ones, which a memory does not hold twice",
    "gpt_oss": "each of its heads has a learned sink in its softmax, beside which a memory is not read yet",
    "t5gemma2": "its decoder norms the keys that it makes of encoder states and reads them in one softmax with its own "
    "tokens, while a memory is read through plain linear maps",
    "mllama": "its cross-attention norms the keys that it makes of what an image encoder gave",
    "moonshine": "its encoder reads the samples of a sound, for which there are no windows yet, and its heads may be "
    "padded before they attend",
    "moonshine_streaming": "its decoder adds to every encoder state what depends on its place in the recording, so a "
    "stored state would mean another place",
    "dia": "it writes under guidance, for which it runs every row a second time without the text: that row would read "
    "the memory too",
    **dict.fromkeys(("falcon", "gpt_neo", "xglm"), OWN_ATTENTION),
    "fsmt": OWN_ATTENTION,
    "mvp": OWN_ATTENTION,
    "prophetnet": OWN_ATTENTION,
    "speecht5": OWN_ATTENTION,
}
"""By ``config.model_type``."""
