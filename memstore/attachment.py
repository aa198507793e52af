"""The live binding of memories to a model's decoder layers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from memstore.attaching import check_fits
from memstore.errors import AttachError, FingerprintMismatchError, HookError
from memstore.fingerprint import fingerprint, tokenizer_hash
from memstore.hooks import AttentionFunction, exactly, install, uncompiled
from memstore.inputs import check_words, given_inputs
from memstore.memory import Memory, OpenMemory
from memstore.places import Places
from memstore.provenance import Fold, Ledger, Provenance
from memstore.reading.passes import device_of
from memstore.rows import Rows, with_fewer, with_more

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter

TopK = int | Literal["all"] | None


class Attachment(ABC):
    """Memories bound to a model: a context manager. On leaving it, also by an exception, every hook is gone."""

    strict = True  # whether a memory that is added must have the model's fingerprint

    def __init__(self, adapter: ModelAdapter, rows: Sequence[Sequence[Memory]], explain: bool) -> None:
        if not isinstance(explain, bool):
            raise AttachError(f"explain={explain!r} must be True or False.")
        self.adapter, self.model, self.explain = adapter, adapter.model, explain
        self.rows = [list(row) for row in rows]
        self._opened: dict[int, OpenMemory] = {}
        self._stack = ExitStack()
        self._ledger = Ledger() if explain else None
        self._prompt_length: int | None = None  # where it is known
        self._calls = 0
        self._claim = threading.Lock()
        self._thread: int | None = None  # which is inside a step

    @abstractmethod
    def _readers(self) -> dict[nn.Module, AttentionFunction]:
        """The attention modules to hook, and how each reads."""

    @abstractmethod
    def _stage(self) -> nn.Module:
        """The module whose forward pass is one step."""

    @abstractmethod
    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepare a step; returns the keyword arguments to run it with."""

    @abstractmethod
    def _inputs(self, prompt: str | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """Model inputs for a prompt in words, or for none."""

    @abstractmethod
    def _prepare(self) -> None:
        """Build what reading needs and is not there yet, once the memories of all rows are open: on entering, and when
        the rows' memories have changed. Where that fails, all is as it was."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what :meth:`_prepare` built and of everything that views the memories."""

    @abstractmethod
    def _after(self, output: Any) -> None:
        """Take note of what a step returned."""

    def __enter__(self) -> Self:
        if self._opened:
            raise AttachError("This attachment is in use already; leave it before entering it again.")
        with ExitStack() as stack:
            stack.callback(self._close_all_but, ())
            stack.callback(self._release)
            self._read_from_now_on(self.rows)
            readers = {module: exactly(read) for module, read in self._readers().items()}
            stack.callback(install(readers))
            self._places, self._device = Places(self.model, readers), device_of(self.model)
            stage = self._stage()
            stack.callback(stage.register_forward_pre_hook(self._pre_hook, with_kwargs=True).remove)
            stack.callback(stage.register_forward_hook(self._post_hook).remove)
            stack.callback(stage.register_forward_hook(self._free, always_call=True).remove)
            self._thread = None
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __reduce__(self) -> str:
        raise AttachError(
            "An attachment, and a model while it has one, cannot be copied or pickled. Leave the attachment first."
        )

    def add(self, *memories: Memory, rows: Collection[int] | None = None) -> None:
        """Attach more memories to these rows, None standing for all, between two steps or generations.

        Only they are opened and searched; what is attached already stays as it is. A decoder-only model reads them for
        new prompts: a sequence that is being written keeps the excerpt that was chosen for it.

        Raises what :func:`memstore.attach` raises for them, and AttachError in the middle of a step; then all is as it
        was.
        """
        with self._between_steps():
            lists = with_more(self.rows, memories, rows)
            self._check_fit(memories)
            self._read_from_now_on(lists)

    def remove(self, *memories: Memory, rows: Collection[int] | None = None) -> None:
        """Detach memories from these rows, None standing for all that have them, between two steps or generations.

        Raises AttachError for a memory that is not attached there, a row that would have none left, and in the middle
        of a step; then all is as it was.
        """
        with self._between_steps():
            self._read_from_now_on(with_fewer(self.rows, memories, rows))

    def empty_prompt(self, batch_size: int = 1) -> Any:
        """Encoder outputs for ``model.generate(encoder_outputs=…)`` without a prompt. Raises AttachError if the model
        has no encoder."""
        raise AttachError(f"{type(self.model).__name__} has no encoder; give it a prompt.")

    def open_memory(self, memory: Memory) -> OpenMemory:
        """The memory's open records. They live as long as this attachment."""
        return self._opened[id(memory)]

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> Any:
        """``model.generate`` over the attached memories.

        With a prompt in words and a tokenizer, returns the answer as a str (through the chat template, if there is
        one). With ``input_ids=`` or other model inputs, returns what ``model.generate`` returns; an encoder-decoder
        may be given no input at all. Further keywords go to ``model.generate``.

        Raises FingerprintMismatchError for another tokenizer than the one a memory was written with, AttachError for
        inputs that cannot be shared out among the rows.
        """
        self._check_entered()
        if prompt is not None:
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
        if prompt is None and not given and kwargs.get("assistant_model") is not None:
            raise AttachError("An assistant model reads the prompt for itself, and there is none. Give a prompt.")
        states = getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None)
        for tensor in (*given.values(), *([] if states is None else [states])):
            # Before beams are made of rows: then a row's beams could be taken for further rows.
            self._groups(len(tensor))
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

    def _check_entered(self) -> None:
        if not self._opened:
            raise AttachError("Nothing is attached yet: write `with memstore.attach(…) as attached:` around the use.")

    def _check_fit(self, memories: Sequence[Memory]) -> None:
        facts = fingerprint(self.adapter)
        for memory in memories:
            check_fits(memory, self.adapter, facts, self.strict)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Inside, no step begins. Raises AttachError if one is running, or nothing is attached."""
        self._check_entered()
        with self._claim:
            if self._thread is not None:
                raise AttachError("A step is running: memories are added and removed between steps.")
            yield

    def _read_from_now_on(self, rows: Rows) -> None:
        """Let the rows read these memories: open the new ones, close those that no row reads. If one cannot be read,
        nothing has changed."""
        before = self.rows, tuple(self._opened)
        try:
            with torch.inference_mode(False):  # else no gradient could ever go through what is opened here
                for memory in (memory for row in rows for memory in row):
                    if id(memory) not in self._opened:
                        self._opened[id(memory)] = memory.open()
                        if self.explain:
                            _ = memory.offsets  # kept from now on: the memory may be removed while it is attached
                self.rows = rows
                self._prepare()
        except BaseException:
            self.rows = before[0]
            self._close_all_but(before[1])
            raise
        self._close_all_but({id(memory) for row in rows for memory in row})

    def _close_all_but(self, kept: Collection[int]) -> None:
        for key in [key for key in self._opened if key not in kept]:
            self._opened.pop(key).close()

    def _check_same(self) -> None:
        """Raises AttachError if the model is no longer what the memories were attached to."""
        name, device = type(self.model).__name__, device_of(self.model)
        if device != self._device:
            raise AttachError(
                f"This {name} was moved from {self._device} to {device} while memories are attached to it. Move it "
                "back, or leave the attachment and attach them again."
            )
        if (exchanged := self._places.exchanged()) is not None:
            raise AttachError(
                f"{exchanged} of this {name} was exchanged while memories are attached to it. Leave the attachment and "
                "attach them again, to the model as it is now."
            )

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

    @uncompiled
    def _pre_hook(
        self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with self._claim:
            if self._thread not in (None, threading.get_ident()):
                raise AttachError(
                    "Another thread is running this model: with memories attached it serves one at a time. Take turns "
                    "with a lock around generate."
                )
            self._thread = threading.get_ident()
        self._check_same()
        self._calls = 0
        return args, self._before(args, kwargs)

    @uncompiled
    def _post_hook(self, stage: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._calls:
            raise HookError(
                f"{type(self.model).__name__} ran without calling its attached attention, so the memory was not read. "
                "Its attention does not follow transformers' AttentionInterface; it needs an adapter of its own."
            )
        self._after(output)
        if self._ledger is not None and not self._nested():
            self._ledger.close()

    @uncompiled
    def _free(self, stage: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The step is over, whether it succeeded or not; a pass inside of a step does not end it."""
        if self._thread == threading.get_ident() and not self._nested():
            self._thread = None

    def _nested(self) -> bool:
        """Whether a pass of the model is running that is a part of a step."""
        return False

    def _groups(self, batch: int) -> list[tuple[list[Memory], slice]]:
        """Each row's memories and its rows in a batch: beams and return sequences of one row stand together."""
        if batch % len(self.rows):
            raise AttachError(
                f"{len(self.rows)} rows of memories are attached; a batch of {batch} cannot be shared out among them."
            )
        each = batch // len(self.rows)
        return [(list(row), slice(i * each, (i + 1) * each)) for i, row in enumerate(self.rows)]
