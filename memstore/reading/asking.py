"""What a decoder asks of a memory: a bounded sample of its queries, by which an index is judged and tuned.

Queries are not distributed like the keys they are held against, so keys cannot tell what a search will find.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from memstore.errors import CheckError, HookError
from memstore.evaluating import evaluating
from memstore.hooks import Given, tapped
from memstore.open_memory import OpenMemory
from memstore.reading.passes import EncoderStates
from memstore.reading.rotary import turned

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter, EncoderDecoderAdapter

PASSAGES = 4  # evenly spaced over the document
WRITTEN = 32  # tokens that an encoder-decoder writes about each passage, at most
READ = 64  # tokens of each passage that a decoder-only model reads
POSITIONS = 128  # of which queries are kept, at most
BYTES = 16 << 20  # that the queries of all positions may take, unless a single position takes more

GREEDY: dict[str, Any] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p")),
    "num_beams": 1,
    "do_sample": False,
    "num_return_sequences": 1,
    "early_stopping": False,
    "length_penalty": 1.0,
    "min_length": 0,
    "use_cache": True,  # else every step asks again what the steps before have asked
}


def passages(num_tokens: int, size: int) -> list[tuple[int, int]]:
    """Start and end of up to four passages of ``size`` tokens, or of the whole document if it is shorter."""
    last = max(0, num_tokens - size)
    starts = dict.fromkeys(i * last // (PASSAGES - 1) for i in range(PASSAGES))
    return [(start, min(start + size, num_tokens)) for start in starts]


def written_queries(adapter: EncoderDecoderAdapter, opened: OpenMemory) -> dict[int, Tensor]:
    """What cross-attention asks while the model writes about passages of a memory, each as long as its own window.

    Returns {layer: [m, H, d]} float32, scaled and carried into the space of the encoder states. Raises CheckError for a
    model that cannot write, AttachError while a memory is attached to it.
    """
    model: Any = adapter.model
    if not model.can_generate():
        raise CheckError(f"{type(model).__name__} has no head to write with. Load the model with its head.")
    attentions = adapter.cross_attentions()
    asked: dict[int, list[Tensor]] = {}
    scalings: dict[int, float] = {}

    def note(i: int, given: Given) -> None:
        asked.setdefault(i, []).append(given.query)
        scalings[i] = given.scaling

    room = adapter.max_target
    written = WRITTEN if room is None else max(1, min(WRITTEN, room // 2))  # and its start needs some
    queries: dict[int, Tensor] = {}
    with evaluating(model):
        with _greedy(model, written + 1), tapped([attention.module for attention in attentions], note):
            for start, stop in passages(opened.manifest.num_tokens, adapter.native_window):
                states = opened.rows("hidden", start, stop).to(model.device, model.dtype)[None]
                model.generate(encoder_outputs=EncoderStates(last_hidden_state=states))
        _check_complete(adapter, asked, len(attentions))
        for i, attention in enumerate(attentions):
            query = torch.cat(asked[i], dim=2)
            kept = _spread(query.shape[2], len(attentions) * attention.num_heads * adapter.width)
            absorbed = attention.absorb(query[:, :, kept], scalings[i])
            queries[attention.layer_idx] = absorbed[0].transpose(0, 1).contiguous().cpu()
    return queries


def reading_queries(adapter: DecoderOnlyAdapter, opened: OpenMemory) -> dict[int, Tensor]:
    """What self-attention asks while the model reads passages of a document, as scouting asks it of the memory.

    Each passage stands behind the memory's prefix, whose own queries do not count. Returns {layer: [m, H, c]} float32,
    scaled, and turned to the distance that scouting asks from. Raises AttachError while a memory is attached.
    """
    manifest, device = opened.manifest, adapter.model.device
    prefix, ids = list(manifest.prefix_ids), cast(Any, opened.memory.token_ids)
    cuts = passages(manifest.num_tokens, min(READ, manifest.rule.window))
    tokens = torch.tensor([prefix + ids[start:stop].tolist() for start, stop in cuts], device=device)
    positions = torch.arange(len(prefix), tokens.shape[1], device=device).expand(len(tokens), -1)
    queries: dict[int, Tensor] = {}

    def note(i: int, given: Given) -> None:
        far = turned(adapter, i, given.query[:, :, len(prefix) :], positions) * given.scaling
        flat = far.transpose(1, 2).flatten(0, 1)  # [passages · T, H, c]
        kept = _spread(len(flat), len(adapter.self_attentions) * flat[0].numel())
        queries[i] = flat[kept].contiguous().cpu()

    with evaluating(adapter.model), adapter.held(), tapped(adapter.self_attentions, note):
        adapter.decoder(input_ids=tokens, use_cache=False)
    _check_complete(adapter, queries, len(adapter.self_attentions))
    return queries


@contextmanager
def _greedy(model: Any, max_length: int) -> Iterator[None]:
    """``model.generate`` writes the most probable tokens, with the decoder start and the rules of its own settings.

    The settings are replaced, not overridden: what is unset in overriding ones would be filled up from those replaced.
    """
    own = model.generation_config
    model.generation_config = copy.deepcopy(own)
    model.generation_config.update(**GREEDY, max_length=max_length)
    try:
        yield
    finally:
        model.generation_config = own


def _spread(count: int, numbers: int) -> Tensor:
    """Which of ``count`` positions are kept, evenly spaced, where all queries of one are ``numbers`` float32."""
    most = min(count, POSITIONS, max(1, BYTES // (4 * numbers)))
    return torch.linspace(0, count - 1, most).round().long()


def _check_complete(adapter: Any, asked: Mapping[int, object], depth: int) -> None:
    if len(asked) < depth:
        raise HookError(
            f"{type(adapter.model).__name__} ran without calling all of its attention modules, so what it asks is not "
            "seen. Its attention does not follow transformers' AttentionInterface; it needs an adapter of its own."
        )
