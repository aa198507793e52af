"""What ``attached.generate`` is given to read, checked before the model meets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from memstore.errors import AttachError

SHAPES = {  # of which generate takes one
    "input_ids": "[rows, tokens]",
    "inputs": "[rows, tokens]",
    "input_features": "[rows, frames or channels, channels or frames]",
    "inputs_embeds": "[rows, tokens, width]",
}


def given_inputs(keywords: Mapping[str, Any], vocab_size: int) -> dict[str, Tensor]:
    """The inputs among the keywords of generate. Raises AttachError for what is no tensor of the right shape, holds
    no rows, or has ids that are not below ``vocab_size``, 0 standing for a model that reads no ids."""
    given = {name: keywords[name] for name in SHAPES if keywords.get(name) is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise AttachError(f"{name} is a {type(tensor).__name__}; give a tensor {SHAPES[name]}.")
        if name == "inputs" and not vocab_size:  # features, by their other name
            continue
        if tensor.dim() != SHAPES[name].count(",") + 1 or not len(tensor):
            raise AttachError(
                f"{name} has shape {list(tensor.shape)}; give a tensor {SHAPES[name]} of at least one row."
            )
        if name in ("input_ids", "inputs") and vocab_size:
            _check_ids(name, tensor, vocab_size)
    return given


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype.itemsize == 1:
        raise AttachError(f"{name} is of {ids.dtype}; token ids are whole numbers, such as torch.long.")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise AttachError(
            f"{name} holds ids from {int(ids.min())} to {int(ids.max())}; this model knows 0 to {vocab_size - 1}. Use "
            "the tokenizer that belongs to the model."
        )


def check_words(prompt: object) -> None:
    """Raises AttachError for a prompt that is no text, or no valid one."""
    if not isinstance(prompt, str):
        raise AttachError(
            f"A prompt is one text, not a {type(prompt).__name__}. Give token ids as input_ids=; for several "
            "prompts, what tokenizer([…], padding=True, return_tensors='pt') makes of them, and no tokenizer."
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise AttachError(f"The prompt is not valid Unicode at character {error.start}. Is it UTF-8?") from error


def check_messages(messages: object) -> None:
    """Raises AttachError for what is no chat: messages with a role and a content, both texts."""
    if not isinstance(messages, Sequence):
        raise AttachError(f"A prompt is one text, or a chat: a list of messages. This is a {type(messages).__name__}.")
    if not messages:
        raise AttachError("A chat is a list of at least one message, {'role': …, 'content': …}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise AttachError(
                f"Message {i} of the chat is no {{'role': …, 'content': …}} with a text each. Several prompts are "
                "given as tensors: **tokenizer([…], padding=True, return_tensors='pt')."
            )
        check_words(message["content"])
