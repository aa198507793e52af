"""Families that no adapter serves, each with what in it prevents that."""

from __future__ import annotations

OWN_ATTENTION = "its attention does not follow transformers' AttentionInterface, so nothing can be attached to it"

REFUSED = {
    "t5gemma2": "its decoder norms the keys that it makes of encoder states and reads them in one softmax with its own "
    "tokens, while a memory is read through plain linear maps",
    "mllama": "its cross-attention norms the keys that it makes of what an image encoder gave",
    "moonshine": "its encoder reads the samples of a sound, for which there are no windows yet, and its heads may be "
    "padded before they attend",
    "moonshine_streaming": "its decoder adds to every encoder state what depends on its place in the recording, so a "
    "stored state would mean another place",
    "dia": "it writes under guidance, for which it runs every row a second time without the text: that row would read "
    "the memory too",
    "fsmt": OWN_ATTENTION,
    "mvp": OWN_ATTENTION,
    "prophetnet": OWN_ATTENTION,
    "speecht5": OWN_ATTENTION,
}
"""By ``config.model_type``."""
