"""Encoder-decoders that no adapter knows, served where a probe proves that a memory of theirs is read exactly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from memstore.cross_attention import CrossAttention, plain_linear
from memstore.errors import GenericAdapterNotice, MemstoreError, UnsupportedModelError
from memstore.evaluating import evaluating
from memstore.families import EncoderDecoderAdapter
from memstore.hooks import PREFIX
from memstore.memory import Memory
from memstore.notices import outside
from memstore.reading.hidden import HiddenAttachment
from memstore.reading.passes import EncoderStates
from memstore.reading.shelves import Source
from memstore_adapters.probing import Found, find, logits

EXACT = 1e-4  # of the largest logit
TELLING = 1e-2  # of what another document changes in the logits: a wrong reading must not pass where little is read
WINDOW, DOCUMENT, PROMPT, ANSWER = 1024, 24, 11, 5  # tokens, as far as the model has so many positions
SOURCE_POSITIONS = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings", "n_positions")
TARGET_POSITIONS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "n_positions")

# By attention implementation, which may decide whether scores are soft-capped: what was found, or what is wrong.
_outcomes: WeakKeyDictionary[PreTrainedModel, dict[str, list[Found] | str]] = WeakKeyDictionary()


class GenericAdapter(EncoderDecoderAdapter):
    """Cross-attention is whatever a run of the model shows to be one.

    found: its cross-attention, of which nothing is proved; None lets the model be probed, once.
    """

    model_types = ()

    def __init__(self, model: PreTrainedModel, found: Sequence[Found] | None = None) -> None:
        super().__init__(model)
        self._found = proved(model) if found is None else found

    @classmethod
    def serves_unknown(cls, model: PreTrainedModel) -> bool:
        encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
        return bool(encoder_decoder) and getattr(model, "main_input_name", None) == "input_ids"

    @property
    def native_window(self) -> int:
        return self.max_window or 512

    @property
    def max_window(self) -> int | None:
        return _first(SOURCE_POSITIONS, self.encoder, self.model)

    @property
    def max_target(self) -> int | None:
        return _first(TARGET_POSITIONS, self.model.get_decoder(), self.model)

    def cross_attentions(self) -> list[CrossAttention]:
        made = []
        for layer_idx, found in enumerate(self._found):
            module = self.model.get_submodule(found.module)
            key, value = (plain_linear(self.model.get_submodule(name), module) for name in (found.key, found.value))
            heads = (found.num_heads, key, value, found.num_kv_heads, found.softcap)
            made.append(CrossAttention(module, layer_idx, *heads))
        return made


class ProbedReading(HiddenAttachment):
    """The reading of encoder states [1, n, d] that stand in no store."""

    def __init__(self, adapter: EncoderDecoderAdapter, states: Tensor) -> None:
        memory = SimpleNamespace(
            name="a probe",
            num_tokens=states.shape[1],
            open=lambda: SimpleNamespace(close=lambda: None),  # there is nothing to open
        )
        super().__init__(adapter, [[cast(Memory, memory)]], top_k="all")
        self._states = states[0]

    def _source(self, memory: Memory, searched: bool) -> Source:
        return Source(memory, [self._states])


def proved(model: PreTrainedModel) -> list[Found]:
    """The model's cross-attention, once it was proved that it reads exactly. Tells so the first time.

    Raises UnsupportedModelError for what cannot be read exactly, AttachError for what cannot be hooked.
    """
    outcomes = _outcomes.setdefault(model, {})
    implementation = str(cast(Any, model.get_decoder()).config._attn_implementation).removeprefix(PREFIX)
    if implementation not in outcomes:
        try:
            found, error = _probe(model)
        except UnsupportedModelError as refusal:
            outcomes[implementation] = str(refusal)
        else:
            outcomes[implementation] = found
            warnings.warn(
                f"No adapter knows model_type {model.config.model_type!r}. The {len(found)} cross-attentions of this "
                f"{type(model).__name__} were found by probing, and read a memory exactly (largest difference "
                f"{error:.1g} of the largest logit).",
                GenericAdapterNotice,
                stacklevel=outside(),
            )
    outcome = outcomes[implementation]
    if isinstance(outcome, str):
        raise UnsupportedModelError(
            f"No adapter knows model_type {model.config.model_type!r}, and a probe of this {type(model).__name__} "
            f"failed: {outcome.rstrip('.')}. It needs an adapter of its own."
        )
    return outcome


def _probe(model: PreTrainedModel) -> tuple[list[Found], float]:
    """Its cross-attention and the largest relative difference. UnsupportedModelError says what was wrong."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            # A copy, because some models change as they read; in float32, because half precision proves little.
            copied = copy.deepcopy(model).float()
            with evaluating(copied):
                _check_independent(copied)
                return _read_and_compare(copied)
        except MemstoreError:
            raise
        except Exception as error:  # whatever a model may do that nobody here has seen
            raise UnsupportedModelError(f"{type(error).__name__}: {error}".rstrip(".")) from error


def _check_independent(model: PreTrainedModel) -> None:
    """What the encoder makes of a window must not depend on what it read before or beside it, be it long or short."""
    adapter = GenericAdapter(model, ())
    windows = torch.cat([_random_ids(model, WINDOW, seed) for seed in range(2)])
    alone = adapter.encode(windows[:1])["hidden"]
    adapter.encode(windows[:1, :PROMPT])
    due = EXACT * float(alone.abs().max())
    for again in (adapter.encode(windows[:1])["hidden"], adapter.encode(windows)["hidden"][:1]):
        if not float((again - alone).abs().max()) <= due:
            raise UnsupportedModelError(
                "what its encoder makes of a window depends on what it read before or beside it"
            )


def _read_and_compare(model: PreTrainedModel) -> tuple[list[Found], float]:
    document, other, prompt, answer = map(_random_ids, repeat(model), (DOCUMENT, DOCUMENT, PROMPT, ANSWER), range(4))
    encoder = cast(Any, model.get_encoder())
    states, before = (encoder(ids).last_hidden_state for ids in (document, prompt))
    adapter = GenericAdapter(model, found := find(model, states, answer))
    joined = EncoderStates(last_hidden_state=torch.cat((before, states), dim=1))
    alone = logits(model, input_ids=document, decoder_input_ids=answer)
    changed = alone - logits(model, input_ids=other, decoder_input_ids=answer)
    both = logits(model, encoder_outputs=joined, decoder_input_ids=answer)
    with ProbedReading(adapter, states) as attached:
        read = logits(model, encoder_outputs=attached.empty_prompt(), decoder_input_ids=answer)
        read_both = logits(model, input_ids=prompt, decoder_input_ids=answer)
    largest = 0.0
    for what, plain, ours in (("a document", alone, read), ("a prompt and a document", both, read_both)):
        error = float((ours - plain).abs().max())
        due = min(EXACT * float(plain.abs().max()), TELLING * float(changed.abs().max()))
        if not error <= due or not due:  # a NaN is no agreement, nor is it where nothing depends on the document
            raise UnsupportedModelError(
                f"{what} read from a memory gives logits that differ by {error:.2g} from the model's own; up to "
                f"{due:.2g} is allowed, {TELLING:.0%} of what another document changes in them or less"
            )
        largest = max(largest, error / float(plain.abs().max()))
    return found, largest


def _random_ids(model: PreTrainedModel, length: int, seed: int) -> Tensor:
    """Token ids [1, n] that both parts of a model know and that are not special, as many as fit its window."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "unk_token_id")
    special = {getattr(model.config, name, None) for name in names}
    parts = (model.get_encoder(), model.get_decoder())
    size = min(len(cast(Any, part).get_input_embeddings().weight) for part in parts)
    plain = torch.tensor([i for i in range(size) if i not in special])
    shape = (1, min(length, GenericAdapter(model, ()).native_window))
    chosen = torch.randint(len(plain), shape, generator=torch.Generator().manual_seed(seed))
    return plain[chosen].to(model.device)


def _first(names: Sequence[str], *parts: Any) -> int | None:
    """The first of these numbers of positions that a part's configuration has; None where there is none."""
    numbers = (getattr(getattr(part, "config", None), name, None) for part in parts for name in names)
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)
