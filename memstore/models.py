"""A model and its tokenizer by one name: a hub name, a local directory, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(name: str, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, ready to read (evaluation mode), and its tokenizer. Code that a model brings is never run.

    Raises ModelLoadError with the reason when there is no such model or transformers cannot load it.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer

    source, options = _source(name)
    try:
        config = AutoConfig.from_pretrained(source, **options)
        model = _auto_class(config).from_pretrained(source, dtype=getattr(torch, dtype), **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # what is missing, unknown, damaged, or needs another package raises many kinds
        reason = str(error).strip() or type(error).__name__
        elsewhere = "" if Path(source).is_dir() else " A local directory or a .gguf file can be named as well."
        raise ModelLoadError(f"Cannot load the model {name!r}: {reason}{elsewhere}") from error
    return model.eval(), tokenizer


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` is given."""
    try:
        path = Path(name).expanduser()
        is_file, is_dir, exists = path.is_file(), path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such home, no permission to look, no possible path
        raise ModelLoadError(f"Cannot load the model {name!r}: {error}") from error
    if path.suffix == ".gguf":
        if not is_file:
            raise ModelLoadError(f"Cannot load the model {name!r}: there is no such file.")
        return str(path.parent), {"gguf_file": path.name}
    if is_dir:
        return str(path), {}
    if exists or path.is_absolute():  # a hub name is neither, and no hub needs to be asked
        raise ModelLoadError(f"Cannot load the model {name!r}: it is neither a directory nor a GGUF file.")
    return name, {}


def _auto_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH

    if not config.is_encoder_decoder:
        return AutoModelForCausalLM
    if config.model_type in SPEECH:
        return AutoModelForSpeechSeq2Seq
    return AutoModelForSeq2SeqLM
