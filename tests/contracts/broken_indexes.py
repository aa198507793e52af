"""Indexes that each break one promise: the test of the kit that must fail, and what it must say."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from memstore.interfaces import Options, SavedIndex
from memstore.testing import VectorIndexContract
from memstore.vectors import check_finite, checked_keys, checked_queries, padded
from memstore_backends.exact import ExactIndex

FOUND = "test_the_best_keys_are_found"
UNWRITTEN = "test_blocks_are_never_written"
ALIKE = "test_one_search_is_like_the_other"
TUNABLE = "test_tunable_options_change_a_search_without_building_again"
MAXIMA = "test_block_maxima_are_the_best_scores_of_blocks"
SAVED = "test_a_saved_index_is_the_same_in_another_process"


class Kit(VectorIndexContract):
    fails: str
    says: str


class TestUnpadded(Kit):
    fails, says = FOUND, "20 queries and k=1300 gave scores and ids of shapes ((20, 1200), (20, 1200))"

    class index(ExactIndex):
        def search(self, queries, k):
            return tuple(each[:, : self.num_keys] for each in super().search(queries, k))


class TestWorstFirst(Kit):
    fails, says = FOUND, "a better score stands behind a worse one"

    class index(ExactIndex):
        def search(self, queries, k):
            return tuple(each.flip(1) for each in super().search(queries, k))


class TestEmptyFirst(Kit):
    fails, says = FOUND, "an empty slot (id -1) stands before a key"

    class index(ExactIndex):
        def search(self, queries, k):
            return tuple(each.roll(max(0, k - self.num_keys), 1) for each in super().search(queries, k))


class TestZeroForEmpty(Kit):
    fails, says = FOUND, "an empty slot (id -1) has a score other than -inf"

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            return scores.masked_fill(ids < 0, -1e9), ids


class TestRepeating(Kit):
    fails, says = FOUND, "a key was found twice for one query"

    class index(ExactIndex):
        def search(self, queries, k):
            return tuple(torch.cat((each[:, :1], each[:, :-1]), 1) for each in super().search(queries, k))


class TestSmallIds(Kit):
    fails, says = FOUND, "Ids are torch.int32, and must be int64"

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            return scores, ids.int()


class TestHalfScores(Kit):
    fails, says = FOUND, "Scores are torch.float16, and must be float32"

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            return scores.half(), ids


class TestDistances(Kit):
    fails, says = FOUND, "scores differ from the inner products of their keys"

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            return scores - 1, ids


class TestCancelling(Kit):
    fails, says = "test_numbers_may_be_of_any_size", "scores differ from the inner products of their keys"

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            return 1 - (1 - scores), ids


class TestLossy(Kit):
    fails, says, min_recall = FOUND, "k=10: recall is 0.7", 0.9

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k + 3)
            return scores[:, 3:], ids[:, 3:]


class TestMiscounted(Kit):
    fails, says = FOUND, "num_keys and width are (1, 32) after building"

    class index(ExactIndex):
        def build(self, blocks):
            super().build(blocks)
            self.num_keys = len(self.blocks[-1])


class TestFlat(Kit):
    fails, says = "test_blocks_may_be_views_with_strides", "scores differ from the inner products of their keys"

    class index(ExactIndex):
        def build(self, blocks):
            super().build(blocks)
            self.blocks = [torch.empty(0, dtype=block.dtype) for block in blocks]
            for mine, block in zip(self.blocks, blocks, strict=True):
                mine.set_(block.untyped_storage(), block.storage_offset(), block.shape, (block.shape[1], 1))


class TestOneDtype(Kit):
    fails, says = "test_queries_may_be_of_any_dtype_and_number", "same dtype"

    class index(ExactIndex):
        def search(self, queries, k):
            best = (queries @ torch.cat(self.blocks).T).topk(k)
            return padded(best.values, best.indices, k)


class TestNeedy(Kit):
    fails, says = "test_few_keys_are_enough", "out of bounds"

    class index(ExactIndex):
        def build(self, blocks):
            super().build(blocks)
            self.centres = torch.cat(self.blocks)[torch.arange(50)]


class TestMoody(Kit):
    fails, says = ALIKE, "Two equal searches gave different results"

    class index(ExactIndex):
        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            self.searches = getattr(self, "searches", 0) + 1
            return scores * (1 + 1e-4 * self.searches), ids


class TestScaling(Kit):
    fails, says = ALIKE, "A search changed its queries"

    class index(ExactIndex):
        def search(self, queries, k):
            return super().search(queries.mul_(2), k)


class TestNormalising(Kit):
    fails, says = UNWRITTEN, "The blocks that were built from have changed"

    class index(ExactIndex):
        def build(self, blocks):
            super().build(blocks)
            for block in blocks:
                block.div_(2)


class TestMiscounting(Kit):
    fails, says = "test_a_sum_over_all_keys_is_that_of_their_scores", "The log of a sum over all keys is wrong by up to"

    class index(ExactIndex):
        def search_and_sum(self, queries, k):
            scores, ids = self.search(queries, k)
            return scores, ids, scores.logsumexp(1)  # of the keys that were found


class TestCareless(Kit):
    fails, says = "test_wrong_queries_are_refused", "Queries with NaN in them: QueryError is due, but nothing was"

    class index(ExactIndex):
        def search(self, queries, k):
            return padded(*self._search(queries.float().nan_to_num(), k, summed=False)[:2], k)


class TestCarelessOfK(Kit):
    fails, says = "test_a_wrong_k_is_refused", "A search with k=None: QueryError is due, but TypeError was raised"

    class index(ExactIndex):
        def search(self, queries, k):
            return padded(*self._search(queries.float(), k, summed=False)[:2], k)


class TestTrusting(Kit):
    fails, says = "test_wrong_keys_are_refused", "Building from blocks of two widths: IndexBuildError is due, but noth"

    class index(ExactIndex):
        def build(self, blocks):
            self.blocks = list(blocks)


class TestRepairing(Kit):
    fails = "test_keys_that_are_not_finite_are_refused_sooner_or_later"
    says = "Building from a key with inf in it, and searching: IndexBuildError or QueryError is due, but nothing"

    class index(ExactIndex):
        def build(self, blocks):
            super().build([block.nan_to_num(0, 0, 0) for block in blocks])


class TestLenient(Kit):
    fails, says = (
        "test_options_have_defaults_and_know_no_other_names",
        "derive Options from memstore.interfaces.Options",
    )

    class index(ExactIndex):
        class Options(BaseModel):
            nprobe: int = 8


class TestBound(Kit):
    fails, says = MAXIMA, "A block's best score is higher than any score in it"

    class index(ExactIndex):
        def block_maxima(self, queries, size):
            return super().block_maxima(queries, size) + 1


class TestBelow(Kit):
    fails, says = MAXIMA, "A block's best score is lower than the best score in it"

    class index(ExactIndex):
        def block_maxima(self, queries, size):
            return super().block_maxima(queries, size) - 1


class TestFirstBlocks(Kit):
    fails, says = MAXIMA, "The block of the best key is not found"

    class index(ExactIndex):
        def block_maxima(self, queries, size):
            maxima = super().block_maxima(queries, size)
            return maxima.masked_fill(torch.arange(maxima.shape[1]) > 3, -torch.inf)


class Width(Options):
    width: int = 32


class Columns(SavedIndex):
    """Chooses keys by their first columns alone. It keeps the contract, and the classes below do not."""

    Options = Width
    tunable: ClassVar[Any] = {"width": (4, 8, 32)}
    options: Any

    def build(self, blocks):
        self.num_keys, self.width = checked_keys(blocks)
        self.keys = torch.cat(list(blocks)).float()
        check_finite(self.keys)

    def search(self, queries, k):
        queries = checked_queries(queries, self.width, k)
        seen = self.options.width
        ids = (queries[:, :seen] @ self.keys[:, :seen].T).topk(min(k, self.num_keys)).indices
        best = (queries @ self.keys.T).gather(1, ids).sort(descending=True)
        return padded(best.values, ids.gather(1, best.indices), k)

    def save(self, path):
        path.write_bytes(self.keys.numpy().tobytes())

    def load(self, path):
        self.build([torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(-1, 32)])


class TestBuiltOnce(Kit):
    fails, says = TUNABLE, "'width' changed from 4 to 32 changes no result: is it read when searching?"

    class index(Columns):
        def build(self, blocks):
            super().build(blocks)
            self.given = self.options

        def search(self, queries, k):
            self.options = self.given
            return super().search(queries, k)


class TestDearestFirst(Kit):
    fails, says = TUNABLE, "'width' must list the cheapest value first; recall was [1.0, 0."

    class index(Columns):
        tunable: ClassVar[Any] = {"width": (32, 4)}


class TestMisnamed(Kit):
    fails, says = TUNABLE, "'widht' is tunable, and no field of Options"

    class index(Columns):
        tunable: ClassVar[Any] = {"widht": (4, 8)}


class TestRounded(Kit):
    fails, says = SAVED, "An index of 1200 keys, loaded with options {}, finds otherwise"

    class index(Columns):
        def save(self, path):
            path.write_bytes(self.keys.half().float().numpy().tobytes())


class TestTunedBefore(Kit):
    fails, says = SAVED, "An index of 1200 keys, loaded with options {'width': 4}, finds otherwise"

    class index(Columns):
        def load(self, path):
            super().load(path)
            self.options = Width()


class TestElsewhere(Kit):
    fails, says = SAVED, "Nothing was saved at the path that was given"

    class index(Columns):
        def save(self, path):
            path.with_name("cache").write_bytes(b"")


class TestSilent(Kit):
    fails = "test_an_index_that_cannot_be_saved_says_so"
    says = "Saving into a folder that does not exist: OSError is due, but nothing was raised"

    class index(Columns):
        def save(self, path):
            if path.parent.exists():
                super().save(path)


class TestTouching(Kit):
    """Last, because it ends the process that the others share."""

    fails, says = UNWRITTEN, "So ends who writes to memory that is read-only"

    class index(ExactIndex):
        def build(self, blocks):
            super().build(blocks)
            for block in blocks:
                block.add_(0)
