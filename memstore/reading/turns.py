"""What generate was given, which the passes that serve it do not tell: a turn of a talk, or its only one.

A pass over several tokens may be a new question, a part of a long prompt, or some candidates of an assistant. Only
generate knows; so while memories are attached, a model's ``generate`` notes what it was called with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from memstore.errors import AttachError
from memstore.reading.context import Context
from memstore.reading.masks import own_positions, padding_mask

TOKENS = ("inputs_embeds", "input_ids", "inputs")  # what generate reads first, if it is given several
ASKING = "memstore_asking"  # a keyword beside generate's own: how many of the last tokens are the question


@dataclass
class Turn:
    """A call of generate. tokens: [b, T] ids or [b, T, d] embeddings, all of the talk or what is new; None if only
    generate knows. mask: [b, talk] or None. asking: how many of the last tokens are a question. context: what is read,
    once that has been chosen."""

    tokens: Tensor | None = None
    mask: Tensor | None = None
    asking: int | None = None
    context: Context | None = None

    def new_tokens(self, past: int) -> Tensor | None:
        """Those behind the first ``past`` tokens of the talk."""
        if self.tokens is None or (self.mask is not None and self.mask.shape[1] != self.tokens.shape[1]):
            return self.tokens  # a mask that is longer speaks of tokens which are not given again
        return self.tokens[:, past:]


class Turns(threading.local):
    """The turn that this thread is in: None outside of generate, and where an assistant calls it from inside."""

    def __init__(self) -> None:
        self.current: Turn | None = None
        self._deep = False

    @property
    def aside(self) -> bool:
        """Whether the model proposes tokens to itself, as an assistant: what it reads for that is no part of a turn."""
        return self._deep and self.current is None

    @property
    def batch(self) -> int | None:
        """The rows that generate was given, before it makes beams of them; None outside of it."""
        if self.current is None:
            return None
        return 1 if self.current.tokens is None else len(self.current.tokens)

    @contextmanager
    def begun(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], asking: int | None) -> Iterator[None]:
        """Inside, a turn goes on that generate was called for with these arguments."""
        before = self.current, self._deep
        self.current, self._deep = None if self._deep else _turn(args, kwargs, asking), True
        try:
            yield
        finally:
            self.current, self._deep = before


def _turn(args: tuple[Any, ...], kwargs: Mapping[str, Any], asking: int | None) -> Turn:
    given = [kwargs[name] for name in TOKENS if kwargs.get(name) is not None] + list(args[:1])
    tokens, mask = given[0] if given else None, kwargs.get("attention_mask")
    return Turn(
        tokens if isinstance(tokens, Tensor) else None,
        mask if isinstance(mask, Tensor) and mask.dim() == 2 else None,
        asking,
    )


def _check_unguided(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises AttachError for guidance, of which no pass tells whether it is the one without the prompt."""
    configs = (*args[1:2], kwargs.get("generation_config"), model.generation_config)
    config = next((config for config in configs if config is not None), None)
    if kwargs.get("guidance_scale", getattr(config, "guidance_scale", None)) not in (None, 1):
        raise AttachError(
            "Under guidance (guidance_scale=) generate runs the model a second time without the prompt, and that pass "
            "would read the memories too. Leave guidance_scale out."
        )


def noting(model: Any, turns: Turns) -> Callable[[], None]:
    """Let ``model.generate`` note its turns, until the function that is returned is called."""
    generate, own = getattr(model, "generate", None), vars(model).get("generate")
    if generate is None:  # a model without a head
        return lambda: None

    @wraps(generate)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _check_unguided(model, args, kwargs)
        with turns.begun(args, kwargs, kwargs.pop(ASKING, None)):
            return generate(*args, **kwargs)

    def restore() -> None:
        if vars(model).get("generate") is not noted:  # somebody else's by now
            return
        if own is None:
            del model.generate
        else:
            model.generate = own

    model.generate = noted
    return restore


@dataclass(frozen=True)
class Prompt:
    """What is asked after ``past`` tokens of a talk, as the decoder is given it.

    name: "input_ids" or "inputs_embeds". tokens: [B, T] or [B, T, d], by that name. mask: None, [B, past + T], or as a
    static cache has it. own: [B, T], the tokens' usual positions; padding: [B, T]. asking: how many of the last tokens
    are the question, None for as many as matter.
    """

    past: int
    name: str
    tokens: Tensor
    mask: Any
    own: Tensor
    padding: Tensor
    asking: int | None = None

    @property
    def ids(self) -> Tensor | None:
        """[B, T], None where the model was given embeddings."""
        return self.tokens if self.name == "input_ids" else None


def prompt_of(kwargs: Mapping[str, Any], past: int, turn: Turn | None) -> Prompt:
    """The prompt of a first pass with these keywords: all of it, if the pass is over a part only, and without the
    candidates for tokens after it.

    Raises AttachError for a prompt of generate that ends with padding, and for one that generate reads twice.
    """
    name = "input_ids" if kwargs.get("input_ids") is not None else "inputs_embeds"
    tokens, mask = kwargs[name], kwargs.get("attention_mask")
    asked = None if turn is None else turn.new_tokens(past)
    if turn is not None and asked is not None and asked.numel() and asked.shape[1] != (t := tokens.shape[1]):
        if _rereads(tokens, turn, asked):
            raise AttachError(
                "generate reads the whole talk again, behind a cache that holds it, as transformers does in assisted "
                "decoding with a filled cache. Give no cache, or no assistant and no prompt_lookup_num_tokens."
            )
        if asked.shape[1] < t:
            tokens = tokens[:, : asked.shape[1]]
            mask = mask[:, : past + asked.shape[1]] if isinstance(mask, Tensor) and mask.dim() == 2 else mask
        else:
            places = tokens[..., 0] if tokens.dim() == 3 else tokens
            if turn.mask is None and padding_mask(dict(kwargs), places, past).any():
                raise AttachError("A padded prompt that is read in chunks needs its attention_mask=.")
            beams = len(tokens) // len(asked)
            tokens = asked.to(tokens.device).repeat_interleave(beams, 0)
            mask = None if turn.mask is None else turn.mask.to(tokens.device).repeat_interleave(beams, 0)
    given = {name: tokens, "attention_mask": mask, "position_ids": kwargs.get("position_ids")}
    if given["position_ids"] is not None and given["position_ids"].shape[-1] != tokens.shape[1]:
        given["position_ids"] = None
    own = own_positions(given, past)
    padding = padding_mask(given, own, past)
    if turn is not None and padding[:, -1].any():
        raise AttachError(
            "A prompt ends with padding, after which generate would write. Pad on the left: padding_side='left'."
        )
    return Prompt(past, name, tokens, mask, own, padding, None if turn is None else turn.asking)


def _rereads(tokens: Tensor, turn: Turn, asked: Tensor) -> bool:
    """Whether a pass is over all tokens of a talk, of which only ``asked`` are new."""
    assert turn.tokens is not None
    talk = turn.tokens.shape[1]
    return asked.shape[1] < talk <= tokens.shape[1] and torch.equal(tokens[:, :talk].cpu(), turn.tokens.cpu())
