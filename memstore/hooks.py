"""The switch that lets attention modules read from a memory, through transformers' own extension point.

A configuration names the attention function of its modules. While something is attached, it names ours, which looks the
calling module up: a module that is attached reads its memory, any other goes to the function that was active before.

Attention that computes everything itself asks no configuration. Its adapter names a class for it with :func:`wrap`,
which a module takes while it is attached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from memstore.errors import AttachError
from memstore.evaluating import without_autocast

PREFIX = "memstore-"
SUPPORTED = ("sdpa", "eager")

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
F = TypeVar("F", bound=Callable[..., Any])

_readers: WeakKeyDictionary[nn.Module, AttentionFunction] = WeakKeyDictionary()
_switched: dict[int, tuple[PretrainedConfig, str, int]] = {}  # config id -> (config, name before, attachments)
_wrappers: dict[type[nn.Module], type[nn.Module]] = {}  # what computes its attention itself -> what asks a reader


def wrap(attention: type[nn.Module], wrapper: type[nn.Module]) -> None:
    """Let modules of the class ``attention``, which follows no AttentionInterface, take the class ``wrapper`` while
    they are attached.

    The wrapper derives from it, and does in its ``forward`` what the class itself does up to queries, keys and values,
    gives them to :func:`reader_of` the module, and goes on with what that returns. Without a reader, as in a copy that
    was made while the module was attached, it calls the ``forward`` that it overrides.
    """
    _wrappers[attention] = wrapper


def reader_of(module: nn.Module) -> AttentionFunction | None:
    """How a module that is attached reads; None for any other.

    Called as ``reader(module, query, key, value, mask, scaling=…, is_causal=…)`` with query [B, H, T, c], key and value
    [B, G, n, c] and a mask as :func:`memstore.attention.ordinary_attention` takes it. Returns the output [B, T, H, c]
    and None, or weights.
    """
    return _readers.get(module)


def uncompiled(function: F) -> F:
    """The function, called between the graphs of a compiled model: what it reads and counts is never baked into one."""
    return cast(F, cast(Any, torch.compiler.disable)(function))


def exactly(function: AttentionFunction) -> AttentionFunction:
    """The function without autocast, which would add up what is read in half precision, however much it is."""

    def attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.is_autocast_enabled(query.device.type):
            return function(module, query, *args, **kwargs)
        with without_autocast(query.device.type):
            return function(module, query, *args, **kwargs)

    return attention


def base_attention(module: nn.Module, implementation: str) -> AttentionFunction:
    """The attention function that ``module`` uses under ``implementation`` ("sdpa" or "eager")."""
    if implementation != "eager":
        function: AttentionFunction = ALL_ATTENTION_FUNCTIONS[implementation]
        return function
    for cls in type(module).__mro__:  # eager attention is no entry of the interface, it stands beside its class
        eager: AttentionFunction | None = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise AttachError(f"{type(module).__name__} has no eager attention function; load the model with sdpa attention.")


def base_implementation(module: nn.Module) -> str:
    """The implementation that was active before ours was switched on; for attention that knows none, what is equal."""
    if _is_wrapped(module):
        return "sdpa"
    return str(cast(PretrainedConfig, module.config)._attn_implementation).removeprefix(PREFIX)


def _dispatch(implementation: str) -> AttentionFunction:
    @uncompiled
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        function = _readers.get(module) or base_attention(module, implementation)
        return function(module, query, key, value, attention_mask, **kwargs)

    return attention


def install(readers: Mapping[nn.Module, AttentionFunction]) -> Callable[[], None]:
    """Let these modules read through their functions, until the function that is returned is called.

    Raises AttachError if a module is attached already or its attention implementation is not supported.
    """
    for module in readers:
        if module in _readers:
            raise AttachError("This model has memories attached already; leave that attachment first.")
        if base_implementation(module) not in SUPPORTED:
            raise AttachError(
                f"The model runs with {base_implementation(module)!r} attention, which cannot be hooked yet; "
                f'call model.set_attn_implementation("sdpa") first.'
            )
    configs = _configs(readers)
    own = [(module, type(module)) for module in readers if type(module) in _wrappers]
    for config in configs:
        _switch(config)
    for module, cls in own:
        module.__class__ = _wrappers[cls]
    _readers.update(readers)

    def uninstall() -> None:
        for module in readers:
            _readers.pop(module, None)
        for module, cls in own:
            module.__class__ = cls
        for config in configs:
            _switch_back(config)

    return uninstall


class Given(NamedTuple):
    """What a module gives to its attention function: query [B, H, T, c], key and value [B, G, n, c].

    softcap: None where scores are not capped, or not by that function.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    softcap: float | None


@contextmanager
def tapped(modules: Sequence[nn.Module], note: Callable[[int, Given], None]) -> Iterator[None]:
    """Inside, ``note(i, given)`` is called whenever the i-th module attends, which it does as it always does.

    Raises AttachError if a memory is attached to one of them.
    """

    def tap(
        i: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        note(i, Given(query, key, value, scaling, kwargs.get("softcap")))
        return base_attention(module, base_implementation(module))(module, query, key, value, mask, **kwargs)

    uninstall = install({module: partial(tap, i) for i, module in enumerate(modules)})
    try:
        yield
    finally:
        uninstall()


def _switch(config: PretrainedConfig) -> None:
    # A copy that was made while something was attached names our function too.
    before = config._attn_implementation.removeprefix(PREFIX)
    _, before, count = _switched.get(id(config), (config, before, 0))
    _switched[id(config)] = (config, before, count + 1)
    AttentionInterface.register(PREFIX + before, _dispatch(before))
    AttentionMaskInterface.register(PREFIX + before, ALL_MASK_ATTENTION_FUNCTIONS[before])
    config._attn_implementation = PREFIX + before


def _switch_back(config: PretrainedConfig) -> None:
    """A configuration returns to what it was when its last attachment has gone, unless another implementation has been
    chosen for it in the meantime."""
    config, before, count = _switched.pop(id(config))
    if count > 1:
        _switched[id(config)] = (config, before, count - 1)
    elif config._attn_implementation == PREFIX + before:
        config._attn_implementation = before


def _configs(modules: Mapping[nn.Module, AttentionFunction]) -> list[PretrainedConfig]:
    """The distinct configurations that decide for these modules; models built from one object share it."""
    configs = [cast(PretrainedConfig, module.config) for module in modules if not _is_wrapped(module)]
    return list({id(config): config for config in configs}.values())


def _is_wrapped(module: nn.Module) -> bool:
    return type(module) in _wrappers or type(module) in _wrappers.values()
