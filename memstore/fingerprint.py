"""What a memory was written with, and whether a model may read it.

A fingerprint is a flat dict of named facts, so that a refusal can say what differs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from pydantic import JsonValue
from torch.multiprocessing.reductions import StorageWeakRef
from xxhash import xxh3_128

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.interfaces import ModelAdapter

# Configuration that does not change what a model reads: generation, training, bookkeeping.
IGNORED = frozenset(
    """
    transformers_version _name_or_path architectures dtype torch_dtype use_cache return_dict output_hidden_states
    output_attentions num_beams max_length decoder_start_token_id forced_bos_token_id forced_eos_token_id
    begin_suppress_tokens suppress_tokens id2label label2id problem_type tie_word_embeddings tie_encoder_decoder
    gradient_checkpointing is_decoder initializer_range initializer_factor init_std dropout attention_dropout
    activation_dropout classifier_dropout dropout_rate encoder_layerdrop decoder_layerdrop add_cross_attention
    is_encoder_decoder pretraining_tp chunk_size_feed_forward eos_token_id bos_token_id quantization_config
    """.split()
)

SAMPLE = 16  # values of a tensor that are compared to see whether it has changed
TOKENS = 256  # of a vocabulary, for the same
PROBE = "The quick brown fox, 1234.5 — don't! Ünïcödé 読む книга 🙂\n\t  def f(x): return x"

_hashes: WeakKeyDictionary[PreTrainedModel, tuple[tuple[Any, ...], str]] = WeakKeyDictionary()
_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple[Any, ...], str]] = WeakKeyDictionary()


def fingerprint(adapter: ModelAdapter, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, JsonValue]:
    """The facts that decide what this model makes of a document. The tokenizer's is None where none is used."""
    model, rope = adapter.model, adapter.rope()
    facts: dict[str, JsonValue] = {
        "model_type": model.config.model_type,
        "model_class": type(model).__name__,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_hash(adapter),
        "rope": None if rope is None else tensors_hash({"inv_freq": rope}),
        "tokenizer": None if tokenizer is None else tokenizer_hash(tokenizer),
    }
    return facts | _config_facts(model.config.to_dict(), "config")


def mismatches(memory: dict[str, JsonValue], model: dict[str, JsonValue]) -> list[str]:
    """What differs between two fingerprints, in words. Empty if the model may read the memory.

    A configuration key that only one side knows comes from another version of transformers and says nothing; a
    tokenizer is compared where both sides have one.
    """
    shared = [key for key in memory if key in model and (key != "tokenizer" or None not in (memory[key], model[key]))]
    return [
        f"{key} (memory: {memory[key]}, model: {model[key]})"
        for key in shared
        if json.dumps(memory[key]) != json.dumps(model[key])
    ]


def weights_hash(adapter: ModelAdapter) -> str:
    """Hash of the weights that produce the vectors: once per model, and again when one of them has changed.

    A change is noticed by tensors and their versions. A write through ``.data`` or in inference mode leaves no trace
    there; of each tensor some values are compared too, which shows weights that were merged or trained in that way.
    """
    tensors = adapter.weights()
    state = tuple((name, *_state(tensor)) for name, tensor in tensors.items())
    known = _hashes.get(adapter.model)
    if known is None or known[0] != state:
        known = _hashes[adapter.model] = (state, tensors_hash(tensors))
    return known[1]


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    # A weak reference, because the address of a storage that has gone may soon be that of another.
    storage = StorageWeakRef(tensor.untyped_storage())
    sample = tensor.reshape(-1)[:: tensor.numel() // SAMPLE + 1].tolist()
    return storage, tensor.storage_offset(), tensor._version, tensor.shape, tensor.dtype, tensor.device, sample


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary and of how a probe text is cut, which no library version changes by itself.

    Once per tokenizer, and again when it has changed: in size, in what was added, in how it cuts the probe or in one of
    some tokens that are compared.
    """
    ids = tokenizer(PROBE)["input_ids"]
    try:
        size = len(tokenizer)
        some = tokenizer.convert_ids_to_tokens(list(range(0, size, size // TOKENS + 1)))
        state = (ids, size, tokenizer.get_added_vocab(), some)
        known = _tokenizers.get(tokenizer)
    except (AttributeError, LookupError, TypeError):  # not one of transformers', or one with gaps between its ids
        return _vocabulary_hash(tokenizer, ids)
    if known is None or known[0] != state:
        known = _tokenizers[tokenizer] = (state, _vocabulary_hash(tokenizer, ids))
    return known[1]


def _vocabulary_hash(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    packed = json.dumps([sorted(tokenizer.get_vocab().items()), ids]).encode("utf-8", "replace")
    return xxh3_128(packed).hexdigest()


def tensors_hash(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of the names, shapes, dtypes and values of these tensors."""
    digest = xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's values as bytes, without a copy if it lies contiguous on the CPU."""
    return memoryview(cast(Any, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))


def _config_facts(config: dict[str, Any], path: str) -> dict[str, JsonValue]:
    facts: dict[str, JsonValue] = {}
    for key, value in config.items():
        if key in IGNORED:
            continue
        if isinstance(value, dict):
            facts |= _config_facts(value, f"{path}.{key}")
        elif value is None or isinstance(value, bool | int | float | str | list | tuple):
            facts[f"{path}.{key}"] = list(value) if isinstance(value, tuple) else value
    return facts
