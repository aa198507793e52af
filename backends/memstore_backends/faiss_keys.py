"""Keys in the memory of faiss, in the dtype they have: filling a flat index, reading it, widening it for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import faiss
import torch
from torch import Tensor

from memstore.errors import IndexBuildError
from memstore.vectors import CHUNK, float_chunks, largest

HALVES = {torch.float16: faiss.ScalarQuantizer.QT_fp16, torch.bfloat16: faiss.ScalarQuantizer.QT_bf16}
LARGEST = 1e18  # number in a key that can be clustered, since its square is a float32


def flat_index(blocks: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """A flat index that holds these keys as ``dtype``. Raises IndexBuildError if one is NaN or infinite."""
    n, d = sum(map(len, blocks)), blocks[0].shape[1]
    half = HALVES.get(dtype)
    index = faiss.IndexFlatIP(d) if half is None else faiss.IndexScalarQuantizer(d, half, faiss.METRIC_INNER_PRODUCT)
    index.codes.resize(n * index.code_size)  # faiss's own `add` lets a vector grow, and so holds keys twice meanwhile
    index.ntotal = n
    keys = keys_of(index)
    for start, chunk in float_chunks(blocks):
        keys[start : start + len(chunk)] = chunk
    return index


def keys_of(index: Any) -> Tensor:
    """The keys [n, d] of a flat index: its own memory, valid as long as it is."""
    return _view(index, index.codes.data(), index.ntotal)


def check_sizes(blocks: Sequence[Tensor]) -> float:
    """The size of the largest number in these keys. Raises IndexBuildError if one is not finite, or too large."""
    size = largest(blocks)
    if size > LARGEST:
        raise IndexBuildError(
            f"Keys hold numbers up to {size:.0e}; above {LARGEST:.0e} they cannot be clustered. Use an exact index."
        )
    return size


def widened(index: Any) -> Any:
    """An index, flat or of inverted lists, with its keys as float32."""
    if isinstance(index, faiss.IndexScalarQuantizer):
        return flat_index(keys_of(index).split(max(1, CHUNK // index.d)), torch.float32)
    if not isinstance(index, faiss.IndexIVFScalarQuantizer):
        return index
    centroids = faiss.clone_index(index.quantizer)
    wide = faiss.IndexIVFFlat(centroids, index.d, index.nlist, faiss.METRIC_INNER_PRODUCT)
    lists = index.invlists
    for number in range(index.nlist):
        size = lists.list_size(number)
        keys = _view(index, lists.get_codes(number), size).float().view(torch.uint8).numpy()
        wide.invlists.add_entries(number, size, lists.get_ids(number), faiss.swig_ptr(keys))
    wide.ntotal = index.ntotal
    return wide


def _view(index: Any, codes: Any, n: int) -> Tensor:
    """``n`` keys of an index as they lie at ``codes``."""
    half = index.sq.qtype if hasattr(index, "sq") else None
    dtype = next((each for each, quantizer in HALVES.items() if quantizer == half), torch.float32)
    return torch.from_numpy(faiss.rev_swig_ptr(codes, n * index.code_size)).view(dtype).view(n, index.d)
