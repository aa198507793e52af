"""Where a memory stands in a chat: after the template's header, before the user's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from memstore.errors import AttachError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}memory\N{OBJECT REPLACEMENT CHARACTER}"

BETWEEN = "\n\n"  # between a document and the question about it


class ChatFrame(NamedTuple):
    """A chat template cut at the user's words: header token ids before them, and the text on both sides."""

    header: list[int]
    before: str
    after: str


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> ChatFrame:
    """The frame of a one-turn chat. Without a template it is the tokenizer's beginning-of-sequence token, if any.

    Raises ConfigError for a template that refuses such a chat.
    """
    if tokenizer.chat_template is None:
        start = tokenizer("")["input_ids"]
        bos = tokenizer.bos_token_id
        return ChatFrame([bos] if bos is not None and bos in start else [], "", "")
    chat = [{"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(
            f"The chat template refuses a text of the user: {error}. Set tokenizer.chat_template to one that takes it, "
            "or to None."
        ) from error
    before, _, after = str(text).partition(_MARK)
    return ChatFrame(list(tokenizer(before, add_special_tokens=False)["input_ids"]), before, after)


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """A chat up to where the answer begins, and its end from the last message on, if the template tells where that is.

    Raises AttachError for a tokenizer without a template, and for a chat that its template refuses.
    """
    if tokenizer.chat_template is None:
        raise AttachError("This tokenizer has no chat template. Give the prompt as one text.")

    def text(of: Sequence[Mapping[str, str]], ask: bool) -> str:
        return str(tokenizer.apply_chat_template([*map(dict, of)], tokenize=False, add_generation_prompt=ask))

    try:
        whole = text(messages, True)
    except TemplateError as error:
        raise AttachError(f"The chat template refuses these messages: {error}") from error
    try:
        before = text(messages[:-1], False) if len(messages) > 1 else ""
    except TemplateError:  # such as that of a system message alone: nothing tells where the last message begins
        before = ""
    return whole, whole[len(before) :] if whole.startswith(before) else whole
