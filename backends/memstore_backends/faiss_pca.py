"""A search over few numbers of each key with faiss on the CPU: their principal components are scanned, and of the best
the keys themselves are scored."""

from __future__ import annotations

from collections.abc import Sequence

import faiss
import torch
from pydantic import Field
from torch import Tensor

from memstore.interfaces import Options
from memstore.vectors import checked_keys, float_chunks, sample
from memstore_backends.faiss_index import FaissRefinedIndex
from memstore_backends.faiss_keys import check_sizes, flat_index

TRAINABLE = 1024  # keys; of fewer nothing is learned, and all are scored exactly
TRAINING = 65536  # keys whose components are looked for
SHARE = 16  # of a key's numbers one in so many is scanned, by default


class FaissPcaOptions(Options):
    """``components``: how many are scanned, None for one in sixteen of a key's numbers. ``k_factor``: how many times k
    keys are scored. ``seed``: decides from which keys is learned."""

    components: int | None = Field(None, gt=0, lt=2**31)
    k_factor: int = Field(4, gt=0, lt=2**31)
    seed: int = Field(0, ge=0, lt=2**31)


class FaissPcaIndex(FaissRefinedIndex):
    """The first principal components of the keys in bfloat16, and the keys in the dtype they have.

    A model's states differ along few directions, and where one key stands out by far, it stands out there. All are
    scanned, so none is lost for lying among others that are unlike it, as happens with inverted lists.
    """

    Options = FaissPcaOptions
    options: FaissPcaOptions

    def build(self, blocks: Sequence[Tensor]) -> None:
        n, d = checked_keys(blocks)
        size = check_sizes(blocks)
        keys = flat_index(blocks, blocks[0].dtype)
        if n < TRAINABLE:
            self.hold(keys)
            return
        directions = principal(sample(blocks, TRAINING, self.options.seed) / max(size, 1e-30))
        turn = directions[:, : self.options.components or -(-d // SHARE)].T.contiguous()
        few = faiss.LinearTransform(d, len(turn), False)
        faiss.copy_array_to_vector(turn.flatten().numpy(), few.A)
        few.is_trained = True
        codes = faiss.IndexScalarQuantizer(len(turn), faiss.ScalarQuantizer.QT_bf16, faiss.METRIC_INNER_PRODUCT)
        codes.is_trained = True  # nothing needs to be learned of halves
        coded = faiss.IndexPreTransform(few, codes)
        for _, chunk in float_chunks(blocks):
            coded.add(chunk.numpy())
        self.hold(faiss.IndexRefine(coded, keys))


def principal(keys: Tensor) -> Tensor:
    """The directions [d, d] in which keys [n, d] differ, as columns, the widest first."""
    apart = keys.double() - keys.mean(0, dtype=torch.float64)
    directions: Tensor = torch.linalg.eigh(apart.T @ apart).eigenvectors
    return directions.flip(1).float()
