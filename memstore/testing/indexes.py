"""The contract of a search index: :class:`memstore.interfaces.VectorIndex`."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from memstore.errors import IndexBuildError, QueryError
from memstore.interfaces import SavedIndex, VectorIndex
from memstore.testing.checks import refused
from memstore.testing.processes import in_another_process
from memstore.testing.truth import Truth

KEYS, WIDTH = 1200, 32
BEST = 10  # how many keys recall is measured by
MANY = 100  # so many that an approximate search which may do little misses some
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS: dict[str, list[int]] = {
    "one block": [KEYS],
    "a first block of one key": [1, KEYS - 1],
    "a last block of one key": [KEYS - 1, 1],
    "blocks of many sizes": [7, 300, 64, 700, 129],
}
WRONG_QUERIES: dict[str, Tensor] = {
    "another width": torch.ones(2, WIDTH + 1),
    "one dimension": torch.ones(WIDTH),
    "three dimensions": torch.ones(1, 2, WIDTH),
    "float64 numbers": torch.ones(2, WIDTH, dtype=torch.float64),
    "whole numbers": torch.ones(2, WIDTH, dtype=torch.int64),
    "NaN in them": torch.full((2, WIDTH), torch.nan),
    "infinity in them": torch.full((2, WIDTH), -torch.inf),
}
WRONG_KEYS: dict[str, list[Tensor]] = {
    "no blocks": [],
    "an empty block": [torch.ones(0, WIDTH)],
    "an empty block after a full one": [torch.ones(3, WIDTH), torch.ones(0, WIDTH)],
    "blocks of one dimension": [torch.ones(3)],
    "blocks of three dimensions": [torch.ones(3, 2, WIDTH)],
    "blocks of two widths": [torch.ones(3, WIDTH), torch.ones(3, 5)],
    "blocks of two dtypes": [torch.ones(3, WIDTH), torch.ones(3, WIDTH).half()],
    "float64 numbers": [torch.ones(3, WIDTH, dtype=torch.float64)],
    "whole numbers": [torch.ones(3, WIDTH, dtype=torch.int64)],
}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class VectorIndexContract:
    """All that :class:`memstore.interfaces.VectorIndex` promises. Set ``index``, in a class whose name begins Test.

    options: of the index, for all tests but those of few keys, which use its defaults. min_recall: the share of the
    best 10 keys that it finds; at 1.0 it must find the best at every k. score_tolerance: how wrong its scores may be
    beyond rounding, as a share of |query| · max |key|.
    """

    index: ClassVar[type[VectorIndex]]
    options: ClassVar[Mapping[str, Any]] = {}
    min_recall: ClassVar[float] = 1.0
    score_tolerance: ClassVar[float] = 0.0

    @pytest.mark.parametrize("layout", LAYOUTS)
    @each_dtype
    def test_the_best_keys_are_found(self, dtype: torch.dtype, layout: str) -> None:
        keys = random(KEYS, dtype=dtype)
        self.check(keys.split(LAYOUTS[layout]), random(20, seed=1))

    @each_dtype
    def test_blocks_may_be_views_with_strides(self, dtype: torch.dtype) -> None:
        """As those of one key-value head are: [n, heads, d] at one head."""
        heads = torch.stack([random(KEYS, seed, dtype) for seed in range(3)], dim=1)
        self.check([block[:, 1] for block in heads.split(700)], random(20, seed=1))

    @each_dtype
    def test_queries_may_be_of_any_dtype_and_number(self, dtype: torch.dtype) -> None:
        keys = random(KEYS)
        index = self.built([keys])
        for number in (0, 1, 1100):
            queries = random(number, seed=2, dtype=dtype)
            Truth(keys, queries, self.score_tolerance).check(index.search(queries, BEST), BEST)
        self.check([keys], random(20, seed=2, dtype=dtype))

    @pytest.mark.parametrize("number", [1, 2, 40])
    def test_few_keys_are_enough(self, number: int) -> None:
        """With the default options, for those of this class may not fit."""
        keys, queries = random(number), random(5, seed=1)
        index = self.index()
        index.build(keys.split(1))
        truth = Truth(keys, queries, self.score_tolerance)
        for k in (1, number, number + 1, number + 100):
            truth.check(index.search(queries, k), k)
        if number == 1:
            assert truth.recall(index.search(queries, 1)[1], 1) == 1, "The only key is not found."

    def test_equal_keys_are_different_keys(self) -> None:
        self.check(random(60).repeat(KEYS // 60, 1).split(700), random(20, seed=1))

    @pytest.mark.parametrize(
        ("key_size", "query_size"), [(1, 1e6), (1e3, 1e3), (1e3, 1e30), (1e-3, 1e-6), (1, 1e-20), (1, 0)]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_numbers_may_be_of_any_size(self, dtype: torch.dtype, key_size: float, query_size: float) -> None:
        self.check([(random(KEYS) * key_size).to(dtype)], random(20, seed=3) * query_size)

    def test_one_search_is_like_the_other(self) -> None:
        index, queries = self.built([random(KEYS)]), random(50, seed=1)
        kept = queries.clone()
        first, second = index.search(queries, BEST), index.search(queries, BEST)
        assert torch.equal(queries, kept), "A search changed its queries."
        assert all(map(torch.equal, first, second)), "Two equal searches gave different results."

    @each_dtype
    def test_blocks_are_never_written(self, dtype: torch.dtype, tmp_path: Path) -> None:
        keys, queries = random(KEYS, dtype=dtype), random(20, seed=1)
        kept = keys.clone()
        self.check(keys.split(700), queries)
        assert torch.equal(keys, kept), "The blocks that were built from have changed; they may be the store's own."
        file = tmp_path / "keys"
        file.write_bytes(kept.view(torch.uint8).numpy().tobytes())
        found = in_another_process(_search_mapped, self.index, self.options, file, dtype, queries)
        Truth(kept, queries, self.score_tolerance).check(found, BEST)

    @pytest.mark.parametrize("k", [0, -1, True, 2.0, "3", None], ids=repr)
    def test_a_wrong_k_is_refused(self, k: Any) -> None:
        index = self.few()
        with refused(QueryError, f"A search with k={k!r}"):
            index.search(random(2), k)

    @pytest.mark.parametrize("what", WRONG_QUERIES)
    def test_wrong_queries_are_refused(self, what: str) -> None:
        index, queries = self.few(), WRONG_QUERIES[what]
        with refused(QueryError, f"Queries with {what}"):
            index.search(queries, 3)
        with refused(QueryError, f"Queries with {what} for block_maxima"):
            index.block_maxima(queries, 8)

    @pytest.mark.parametrize("what", WRONG_KEYS)
    def test_wrong_keys_are_refused(self, what: str) -> None:
        with refused(IndexBuildError, f"Building from {what}"):
            self.index().build(WRONG_KEYS[what])

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @each_dtype
    def test_keys_that_are_not_finite_are_refused_sooner_or_later(self, dtype: torch.dtype, value: float) -> None:
        keys = random(KEYS, dtype=dtype)
        keys[700, 5] = value
        with refused((IndexBuildError, QueryError), f"Building from a key with {value} in it, and searching"):
            self.built(keys.split(600)).search(random(50, seed=1), BEST)

    def test_options_have_defaults_and_know_no_other_names(self) -> None:
        assert issubclass(self.index.Options, BaseModel), "Options must be a pydantic model."
        assert isinstance(self.index().options, self.index.Options), "Without options an index takes the defaults."
        with refused(
            ValidationError, "An option that does not exist (derive Options from memstore.interfaces.Options)"
        ):
            self.index.Options.model_validate({"no_such_option": 1})

    def test_tunable_options_change_a_search_without_building_again(self) -> None:
        """Replaced on an index that is built, as tuning does."""
        keys, queries = random(KEYS), random(50, seed=1)
        index, truth = self.built([keys]), Truth(keys, queries, self.score_tolerance)
        given = index.options
        for name, values in self.index.tunable.items():
            assert name in self.index.Options.model_fields, f"{name!r} is tunable, and no field of Options."
            assert len(values) > 1, f"{name!r} is tunable, and has fewer than two values to try."
            found: list[tuple[Tensor, Tensor]] = []
            for value in (*values, values[0]):
                self.index.Options.model_validate({**self.options, name: value})
                index.options = given.model_copy(update={name: value})
                found.append(index.search(queries, MANY))
                truth.check(found[-1], MANY)
            recall = [truth.recall(ids, MANY) for _, ids in found]
            assert all(map(torch.equal, found[0], found[-1])), f"{name!r} set back does not give the first results."
            assert not torch.equal(found[0][1], found[-2][1]), (
                f"{name!r} changed from {values[0]} to {values[-1]} changes no result: is it read when searching?"
            )
            assert recall[0] <= recall[-2], f"{name!r} must list the cheapest value first; recall was {recall[:-1]}."
            index.options = given

    @pytest.mark.parametrize("size", [1, 7, 64, KEYS + 1])
    def test_block_maxima_are_the_best_scores_of_blocks(self, size: int) -> None:
        keys, queries = random(KEYS), random(20, seed=1)
        truth = Truth(keys, queries, self.score_tolerance)
        maxima = self.built(keys.split(700)).block_maxima(queries, size)
        blocks = -(-KEYS // size)
        assert maxima.dtype == torch.float32, f"Block maxima are {maxima.dtype}, and must be float32."
        assert tuple(maxima.shape) == (20, blocks), f"{blocks} blocks of 20 queries gave {tuple(maxima.shape)}."
        best = torch.stack([block.amax(1) for block in truth.scores.split(size, dim=1)], dim=1)
        assert (maxima <= best + truth.slack).all(), "A block's best score is higher than any score in it."
        if self.min_recall == 1:
            low = (maxima < best - truth.slack) & ~maxima.isneginf()
            assert not low.any(), "A block's best score is lower than the best score in it."
        top = maxima.gather(1, best.argmax(1, keepdim=True)) >= best.amax(1, keepdim=True) - truth.slack
        assert top.double().mean() >= self.min_recall, "The block of the best key is not found."

    def test_block_maxima_of_no_queries_are_none(self) -> None:
        shape = tuple(self.few().block_maxima(random(0), 8).shape)
        assert shape == (0, 5), f"Block maxima of no queries have shape {shape}, and should have (0, 5)."

    @each_dtype
    def test_a_sum_over_all_keys_is_that_of_their_scores(self, dtype: torch.dtype) -> None:
        keys, queries = random(KEYS, dtype=dtype), random(20, seed=1)
        index, truth = self.built(keys.split(700)), Truth(keys, queries, self.score_tolerance)
        *found, log_sum = index.search_and_sum(queries, BEST)
        assert all(map(torch.equal, found, index.search(queries, BEST))), "search_and_sum finds otherwise than search."
        if log_sum is None:
            pytest.skip(f"{self.index.__name__} gives no sum over all keys")
        assert log_sum.dtype == torch.float32, f"Log sums are {log_sum.dtype}, and must be float32."
        assert tuple(log_sum.shape) == (20,), f"20 queries gave log sums of shape {tuple(log_sum.shape)}."
        wrong = (log_sum.double().cpu() - truth.scores.logsumexp(1)).abs()
        assert (wrong <= truth.slack[:, 0]).all(), (
            f"The log of a sum over all keys is wrong by up to {wrong.max():.3g}."
        )

    @each_dtype
    def test_a_saved_index_is_the_same_in_another_process(self, dtype: torch.dtype, tmp_path: Path) -> None:
        queries = random(50, seed=1)
        for number, options in ((KEYS, self.options), (KEYS, {}), (1, {})):
            index = self.index(self.index.Options.model_validate(options))
            if not isinstance(index, SavedIndex):
                pytest.skip(f"{self.index.__name__} is built each time, not saved")
            index.build([random(number, dtype=dtype)])
            file = tmp_path / f"{number} {len(options)}"
            index.save(file)
            assert file.is_file(), "Nothing was saved at the path that was given."
            cheapest = {name: values[0] for name, values in self.index.tunable.items()}
            for tuned in ({}, cheapest):  # which may differ from those that it was built with
                again = {**options, **tuned}
                size, *loaded = in_another_process(_search_loaded, self.index, again, file, queries)
                assert size == (number, WIDTH), f"Loaded num_keys and width are {size}, not {(number, WIDTH)}."
                index.options = index.options.model_copy(update=tuned)
                same = all(map(torch.equal, index.search(queries, BEST), loaded))
                assert same, f"An index of {number} keys, loaded with options {again}, finds otherwise."

    def test_an_index_that_cannot_be_saved_says_so(self, tmp_path: Path) -> None:
        index = self.few()
        if not isinstance(index, SavedIndex):
            pytest.skip(f"{self.index.__name__} is built each time, not saved")
        with refused(OSError, "Saving into a folder that does not exist"):
            index.save(tmp_path / "missing" / "index")

    def built(self, blocks: Sequence[Tensor]) -> VectorIndex:
        """A new index with the options of this class."""
        index = self.index(self.index.Options.model_validate(self.options))
        index.build(blocks)
        return index

    def few(self) -> VectorIndex:
        """A new index of 40 keys with default options."""
        index = self.index()
        index.build([random(40)])
        return index

    def check(self, blocks: Sequence[Tensor], queries: Tensor) -> None:
        """Compare an index of these blocks with the truth."""
        index, keys = self.built(blocks), torch.cat(list(blocks))
        truth = Truth(keys, queries, self.score_tolerance)
        size = getattr(index, "num_keys", None), getattr(index, "width", None)
        assert size == (KEYS, WIDTH), f"num_keys and width are {size} after building from keys {[KEYS, WIDTH]}."
        for k in (1, BEST, KEYS - 1, KEYS, KEYS + 100):
            found = index.search(queries, k)
            truth.check(found, k)
            recall = truth.recall(found[1], k)
            if k == BEST or self.min_recall == 1:
                assert recall >= self.min_recall, f"k={k}: recall is {recall:.3f}, and min_recall {self.min_recall}."


def random(number: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[number, WIDTH] from a normal distribution."""
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _search_mapped(
    index: type[VectorIndex], options: Mapping[str, Any], file: Path, dtype: torch.dtype, queries: Tensor
) -> tuple[Tensor, Tensor]:
    with file.open("rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that such a buffer must not be written
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        keys = torch.frombuffer(mapped, dtype=dtype).view(-1, WIDTH)
    built = index(index.Options.model_validate(options))
    built.build(keys.split(700))
    return built.search(queries, BEST)


def _search_loaded(
    index: type[VectorIndex], options: Mapping[str, Any], file: Path, queries: Tensor
) -> tuple[tuple[int, int], Tensor, Tensor]:
    loaded = index(index.Options.model_validate(options))
    assert isinstance(loaded, SavedIndex)
    loaded.load(file)
    return (loaded.num_keys, loaded.width), *loaded.search(queries, BEST)
