"""The live binding of memories to a model's decoder layers, and what is asked of it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from torch import Tensor
from transformers import GenerationMixin

from memstore.binding import Binding
from memstore.errors import AttachError, FingerprintMismatchError
from memstore.fingerprint import tokenizer_hash
from memstore.inputs import check_messages, check_words, given_inputs
from memstore.memory import Memory
from memstore.provenance import Fold, Provenance
from memstore.reading.coverage import coverage
from memstore.reading.passes import find_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter
    from memstore.reading.selection import Chosen

TopK = int | Literal["all"] | None
Chat = Sequence[Mapping[str, str]]


class Attachment(Binding):
    """Memories bound to a model, and generating with them. On leaving it, also by an exception, every hook is gone."""

    def __init__(self, adapter: ModelAdapter, rows: Sequence[Sequence[Memory]], explain: bool) -> None:
        super().__init__(adapter, rows, explain)
        self._prompt_length: int | None = None  # where it is known

    chats: ClassVar[bool] = False
    """Whether a prompt may be a chat."""

    @abstractmethod
    def _inputs(self, prompt: str | Chat | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """Keywords of generate for a prompt in words, or for none."""

    def empty_prompt(self, batch_size: int = 1) -> Any:
        """Encoder outputs for ``model.generate(encoder_outputs=…)`` without a prompt. Raises AttachError if the model
        has no encoder."""
        raise AttachError(f"{type(self.model).__name__} has no encoder; give it a prompt.")

    def generate(
        self,
        prompt: str | Chat | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> Any:
        """``model.generate`` over the attached memories.

        With a prompt in words and a tokenizer, returns the answer as a str (through the chat template, if there is
        one). A decoder-only model also takes a chat, messages with "role" and "content", of which the last one is
        looked for in the memories. With ``input_ids=`` or other model inputs, returns what ``model.generate`` returns;
        an encoder-decoder may be given no input at all. Further keywords go to ``model.generate``.

        Raises FingerprintMismatchError for another tokenizer than the one a memory was written with, AttachError for
        inputs that cannot be shared out among the rows.
        """
        self._check_entered()
        if self.chats and not isinstance(prompt, str | None):
            check_messages(prompt)
        elif prompt is not None:
            check_words(prompt)
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)
        if prompt is not None and tokenizer is None:
            raise AttachError("A prompt in words needs tokenizer=; or give input_ids=.")
        given = given_inputs(kwargs, self.adapter.vocab_size)
        if prompt is not None and given:
            raise AttachError("Give either a prompt in words or tensors, not both.")
        if tokenizer is not None and not given and len(self.rows) > 1:
            raise AttachError("An answer in words is that of one row; give tensors for all rows, and no tokenizer.")
        if tokenizer is not None and not given and kwargs.get("return_dict_in_generate"):
            raise AttachError("An answer in words is a str; for more than that, give tensors, and no tokenizer.")
        cache = find_cache(kwargs.values())
        if prompt is not None and cache is not None and cache.get_seq_length():
            raise AttachError("A prompt in words is read from its beginning; to go on with a cache, give input_ids=.")
        if prompt is None and not given and kwargs.get("assistant_model") is not None:
            raise AttachError("An assistant model reads the prompt for itself, and there is none. Give a prompt.")
        states = getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None)
        for tensor in (*given.values(), *([] if states is None else [states])):
            # Before beams are made of rows: then a row's beams could be taken for further rows.
            self.check_batch(len(tensor))
        inputs = kwargs if given else self._inputs(prompt, tokenizer) | kwargs
        lengths = given | ({} if given or "input_ids" not in inputs else {"input_ids": inputs["input_ids"]})
        for name, tensor in lengths.items():
            if self.adapter.vocab_size and name != "input_features":
                self._check_length(tensor.shape[1])
        try:
            output = self._generated(inputs)
        finally:
            if self._thread == threading.get_ident():  # torch calls no hook where a step is interrupted by Ctrl-C
                self._thread = None
        if tokenizer is None or given:
            return output
        start = 0 if self.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        return str(tokenizer.decode(output[0, start:], skip_special_tokens=True)).strip()

    def provenance(
        self, heads: Fold = "mean", layers: Fold = "each", *, beam_indices: Tensor | None = None
    ) -> Provenance:
        """What was read for every token since the last prompt.

        heads, layers: "mean" or "max" over all, or "each". Rows are those of the model's last passes. For beams these
        are the rows of the answer after :meth:`generate`; after ``model.generate`` give the ``beam_indices`` of its
        output, else each row is a place in the search, through which several sequences may have passed.

        Raises AttachError unless attached with ``explain=True``, or for other ways of taking heads and layers together.
        """
        if self._ledger is None:
            raise AttachError("Attach with explain=True to learn what was read.")
        return Provenance(self._ledger, heads, layers, beam_indices)

    def selection(self) -> list[list[Chosen]]:
        """The blocks that each row of the last prompt reads, with their scores: by layer, if layers have their own, and
        in reading order. Of a row that reads its memories whole nothing was chosen, and its list is empty.

        Raises AttachError for an encoder-decoder, which chooses anew at every step, and where nothing is attached.
        """
        raise AttachError(
            f"{type(self.model).__name__} chooses anew what it reads for every token. Attach with explain=True and ask "
            "provenance()."
        )

    def coverage(self, question: str, *, tokenizer: PreTrainedTokenizerBase) -> list[float]:
        """How much of a question the memories of each row hold together at one place, 0 to 1: a low one tells that they
        have no answer. It looks at words alone, runs no model, and may be asked before :meth:`generate`.

        The share of the question's distinct tokens that the best two neighbouring blocks of 64 tokens hold, where each
        token counts by its inverse document frequency. It tells whether the memories speak of what is asked, not
        whether they answer it: `bench/README.md` has its ROC.

        Raises FingerprintMismatchError for another tokenizer than the one a memory was written with, AttachError for
        memories without token ids, and where nothing is attached.
        """
        self._check_entered()
        check_words(question)
        self._check_tokenizer(tokenizer)
        asked = tokenizer(question, add_special_tokens=False)["input_ids"]
        return [coverage(row, asked) for row in self.rows]

    def _generated(self, inputs: dict[str, Any]) -> Any:
        """What ``model.generate`` returns. Which row each token of the answer was made in is noted, if it is asked."""
        model, ledger = cast(Any, self.model), self._ledger
        if ledger is None:
            return model.generate(**inputs)
        ledger.clear()
        if self._own_generate():  # and so is what it returns
            return model.generate(**inputs)
        ids = inputs.get("input_ids", inputs.get("inputs"))
        self._prompt_length = ids.shape[1] if isinstance(ids, Tensor) else None
        try:
            output = model.generate(**inputs | {"return_dict_in_generate": True})
        finally:
            self._prompt_length = None
        if isinstance(output, Tensor):  # of a generation loop that the caller brought
            return output
        ledger.sequences, ledger.beam_indices = output.sequences, output.get("beam_indices")
        ledger.prompt = 1 if model.config.is_encoder_decoder else 0 if ids is None else ids.shape[1]
        configured = inputs.get("generation_config") or model.generation_config
        asked = inputs.get("return_dict_in_generate", configured.return_dict_in_generate)
        return output if asked else output.sequences

    def _own_generate(self) -> bool:
        """Whether the model writes by a loop of its own, as Whisper does."""
        return cast(Any, type(self.model)).generate is not GenerationMixin.generate

    def _check_length(self, num_tokens: int) -> None:
        """Raises AttachError for a prompt that no model can read."""
        if not num_tokens:
            raise AttachError("The prompt holds no tokens. Ask something.")

    def _check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not callable(tokenizer) or not hasattr(tokenizer, "get_vocab"):
            raise AttachError(f"tokenizer= takes the model's tokenizer, not a {type(tokenizer).__name__}.")
        theirs = tokenizer_hash(tokenizer)
        for memory in (memory for row in self.rows for memory in row):
            ours = memory.fingerprint.get("tokenizer")
            if ours is not None and ours != theirs:
                raise FingerprintMismatchError(
                    f"Memory {memory.name!r} was written with another tokenizer. What differs: tokenizer (memory: "
                    f"{ours}, given: {theirs}). Use the tokenizer that belongs to the model."
                )
