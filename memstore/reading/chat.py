"""Where a memory stands in a chat: after the template's header, before the user's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
    """The frame of a one-turn chat. Without a template it is the tokenizer's beginning-of-sequence token, if any."""
    if tokenizer.chat_template is None:
        start = tokenizer("")["input_ids"]
        bos = tokenizer.bos_token_id
        return ChatFrame([bos] if bos is not None and bos in start else [], "", "")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = str(text).partition(_MARK)
    return ChatFrame(list(tokenizer(before, add_special_tokens=False)["input_ids"]), before, after)
