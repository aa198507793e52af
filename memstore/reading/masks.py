"""What a forward pass says about its own tokens: where they stand, which are padding, and what they may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from memstore.attention import hidden_by
from memstore.errors import AttachError


def checked(kwargs: dict[str, Any], past: int) -> dict[str, Any]:
    """The keywords of a pass behind ``past`` tokens, in which tokens, positions and mask fit each other; a mask of two
    dimensions speaks of the tokens up to here.

    Raises AttachError for a pass over no tokens, and for positions or a mask of another shape.
    """
    name = "inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"
    tokens, given, mask = kwargs.get(name), kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.dim() != (2 if name == "input_ids" else 3) or 0 in tokens.shape:
        shape = f"has shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"is a {type(tokens).__name__}"
        raise AttachError(
            f"{name} {shape}; give input_ids [rows, tokens] or inputs_embeds [rows, tokens, width], of at least one "
            "row and token."
        )
    b, t = tokens.shape[:2]
    if given is not None and (size := list(torch.as_tensor(given).shape)) not in ([t], [1, t], [b, t]):
        raise AttachError(f"position_ids has shape {size}; due are {[b, t]}, or none: positions are found by the mask.")
    if mask is None or isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4):
        return kwargs
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != b or mask.shape[1] < past + t:
        shape = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise AttachError(
            f"attention_mask {shape}; due is a tensor {[b, past + t]}, 1 for a token and 0 for padding, with the "
            "tokens that a cache holds, or one of four dimensions."
        )
    return kwargs | {"attention_mask": mask[:, : past + t]}


def own_positions(kwargs: dict[str, Any], past: int) -> Tensor:
    """[B, T]: the positions that the model's own tokens would have without a memory; padding takes none."""
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    b, t = tokens.shape[:2]
    given, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if given is not None:
        return torch.as_tensor(given).expand(b, t)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return ((mask != 0).cumsum(-1) - 1).clamp_min(0)[:, -t:]
    return torch.arange(past, past + t, device=tokens.device).expand(b, t)


def padding_mask(kwargs: dict[str, Any], own: Tensor, past: int) -> Tensor:
    """[B, T] boolean: where the prompt, which comes after ``past`` tokens, is padding.

    With a static cache the mask is 4-dimensional, or one such for each kind of layer: a token that does not see itself
    is padding.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        mask = next(iter(mask.values()))
    if mask is None:
        return torch.zeros_like(own, dtype=torch.bool)
    if mask.dim() == 2:
        return cast(Tensor, mask[:, -own.shape[1] :] == 0)
    place = min(
        past, mask.shape[-1] - mask.shape[-2]
    )  # of the first token; a full sliding cache ends with the last one
    itself = mask[:, 0].diagonal(place, dim1=-2, dim2=-1)[:, : own.shape[1]]
    return hidden_by(itself).expand(own.shape)


def leading(ids: Tensor, padding: Tensor, header: Sequence[int]) -> Tensor:
    """[b, T] boolean: the tokens of ``header`` in the rows that begin with it, after their padding."""
    if not header:
        return torch.zeros_like(padding)
    place = (~padding).cumsum(1) - 1
    inside = ~padding & (place < len(header))
    expected = torch.tensor(header, device=ids.device)[place.clamp(0, len(header) - 1)]
    begins = (inside & (ids == expected)).sum(1, keepdim=True) == len(header)
    return inside & begins


def trailing(ids: Tensor, padding: Tensor, closing: Sequence[int]) -> Tensor:
    """[b, T] boolean: the tokens of ``closing`` in the rows that end with it, before their padding."""
    return leading(ids.flip(1), padding.flip(1), closing[::-1]).flip(1)


def own_mask(mask: Tensor | None, query: Tensor, n: int) -> tuple[Tensor | None, int]:
    """The mask over the model's own tokens and how many keys it speaks of. None means causal, or all for one query."""
    if mask is not None:
        return mask[..., :n], min(n, mask.shape[-1])
    t = query.shape[2]
    if t == 1:
        return None, n
    return torch.ones(t, t, dtype=torch.bool, device=query.device).tril()[None, None], t


def without(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """The mask, boolean, additive or None, where what is ``hidden`` is not seen either."""
    if mask is None:
        return ~hidden
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def equal_rows(tokens: Tensor, padding: Tensor, rows: slice) -> list[slice]:
    """The rows in runs of equal prompts: the beams of one prompt read one excerpt, which may pass from beam to beam."""
    runs = [slice(rows.start, rows.start + 1)]
    for row in range(rows.start + 1, rows.stop):
        if torch.equal(tokens[row], tokens[row - 1]) and torch.equal(padding[row], padding[row - 1]):
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
    return runs
