"""What is special to the indexes of faiss: their recall, their training, small numbers of keys, files and devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from memstore.config import load as load_config
from memstore.errors import ConfigError, IndexBuildError, QueryError
from memstore.testing.processes import in_another_process
from memstore_backends import faiss_gpu, faiss_index, faiss_pq
from memstore_backends.exact import ExactIndex
from memstore_backends.faiss_flat import FaissFlatIndex
from memstore_backends.faiss_ivf import FaissIvfIndex
from memstore_backends.faiss_keys import keys_of, widened
from memstore_backends.faiss_pq import FaissPqIndex
from tests.backends.making import built, check_errors_of_files, digest, digest_of_a_build, exact_ids, mismatched, recall

ALL = [FaissFlatIndex, FaissIvfIndex, FaissPqIndex]
LEARNED = [FaissIvfIndex, FaissPqIndex]
ON_GPUS = [FaissFlatIndex, FaissIvfIndex]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # of scores; where it can, faiss rounds
# queries to bfloat16 as well

every = pytest.mark.parametrize("cls", ALL)
learned = pytest.mark.parametrize("cls", LEARNED)
on_gpus = pytest.mark.parametrize("cls", ON_GPUS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
needs_gpu = pytest.mark.skipif(not faiss.get_num_gpus(), reason="no GPU")


@every_dtype
@pytest.mark.parametrize(("cls", "least"), [(FaissFlatIndex, 1), (FaissIvfIndex, 0.95), (FaissPqIndex, 0.97)])
def test_most_of_what_is_best_is_found(cls, least, dtype):
    keys, queries = mismatched(6000)
    keys = keys.to(dtype)
    index = built(cls, keys.split(1700))
    scores, ids = index.search(queries, 100)
    assert recall(ids, exact_ids(keys, queries, 100)) >= least - (dtype == torch.bfloat16) * 0.01
    true = (queries.double() @ keys.double().T).gather(1, ids)
    assert (scores.diff(dim=1) <= 0).all()
    torch.testing.assert_close(scores.double(), true, rtol=0, atol=ROUNDING[dtype] * float(true.abs().max()))


@learned
def test_an_option_that_is_tuned_acts_on_an_index_that_exists(cls):
    ((name, values),) = cls.tunable.items()
    keys, queries = mismatched(6000)
    index = built(cls, [keys])
    found = []
    for value in (values[0], values[-1]):  # the last one is more than there are lists, or keys
        index.options = index.options.model_copy(update={name: value})
        found.append(recall(index.search(queries, 100)[1], exact_ids(keys, queries, 100)))
    assert found[0] < 0.9 and found[1] >= 0.998
    assert list(values) == sorted(values)


@every_dtype
def test_flat_finds_what_is_best_and_ranks_every_block(dtype):
    keys, queries = mismatched(3001)
    keys = keys.to(dtype)
    index = built(FaissFlatIndex, keys.split(1000))
    exact = built(ExactIndex, [keys.float()])
    if dtype != torch.bfloat16:
        assert torch.equal(index.search(queries, 3001)[1][:, :50], exact.search(queries, 50)[1])
    torch.testing.assert_close(index.block_maxima(queries, 64), exact.block_maxima(queries, 64))
    assert keys_of(index.index).dtype == dtype and torch.equal(keys_of(index.index), keys)


@every
@every_dtype
@pytest.mark.parametrize("n", [1, 2, 15, 40])
def test_few_keys_are_all_found_without_a_warning(cls, dtype, n, capfd):
    keys, queries = mismatched(n, d=5)
    keys = keys.to(dtype)
    index = built(cls, [keys])
    ids = index.search(queries, n + 3)[1]
    np.testing.assert_array_equal(ids[:, :1], exact_ids(keys, queries, 1))
    assert (ids[:, :n].sort(dim=1).values == torch.arange(n)).all() and (ids[:, n:] == -1).all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("d", [1, 2, 3, 7])
def test_codes_of_few_or_an_odd_number_of_numbers(d):
    keys, queries = mismatched(3000, d=d)
    ids = built(FaissPqIndex, [keys]).search(queries, 64)[1]
    assert recall(ids, exact_ids(keys, queries, 64)) > 0.95


@every
def test_keys_and_queries_that_are_alike_fill_every_slot(cls):
    equal, queries = torch.randn(10, 8).repeat(200, 1), torch.randn(4, 8)
    for keys, asked in [(torch.zeros(2000, 8), queries), (equal, queries), (torch.randn(2000, 8), torch.zeros(4, 8))]:
        scores, ids = built(cls, [keys]).search(asked, 150)
        assert (ids >= 0).all() and scores.isfinite().all()
        assert all(len(set(row)) == 150 for row in ids.tolist())
        torch.testing.assert_close(scores, (asked @ keys.T).topk(150).values, rtol=2e-3, atol=2e-3)


@every
@pytest.mark.parametrize(("key_size", "query_size"), [(1e-12, 1), (1e-3, 1e30), (1e6, 1e-20), (1e15, 1e15)])
def test_numbers_of_any_size_keep_their_order(cls, key_size, query_size):
    keys, queries = mismatched(2000)
    scores, ids = built(cls, [keys * key_size]).search(queries * query_size, 50)
    assert recall(ids, exact_ids(keys, queries, 50)) >= 0.95
    best = (queries.double() @ keys.double().T).amax(1) * key_size * query_size
    torch.testing.assert_close(scores[:, 0].double(), best, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_as_large_as_there_are_give_scores_or_an_error(dtype):
    keys, queries = (10 * torch.rand(900, 32, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    keys, queries = (3e37 * keys).to(dtype), queries[:9] + 1  # a sum of such keys is no float32
    scores, ids = built(FaissFlatIndex, [keys]).search(1e-20 * queries, 900)
    truth = (1e-20 * queries.double()) @ keys.double().T
    torch.testing.assert_close(
        scores.double(), truth.topk(900).values, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0
    )
    assert all(len(set(row)) == 900 for row in ids.tolist())
    with pytest.raises(QueryError, match="too large"):
        built(FaissFlatIndex, [keys]).search(queries, 3)


@learned
def test_keys_that_cannot_be_clustered_are_refused(cls):
    keys = torch.randn(3000, 8)
    keys[2999, 7] = 1e25
    with pytest.raises(IndexBuildError, match="numbers up to 1e\\+25; above 1e\\+18 .* Use an exact index"):
        built(cls, keys.split(1500))
    assert built(FaissFlatIndex, [keys]).search(torch.eye(8)[7:], 1)[1].item() == 2999


@every
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_keys_that_are_not_finite_are_refused_wherever_they_are(cls, value):
    keys = torch.randn(3000, 8)
    keys[2999, 7] = value
    with pytest.raises(IndexBuildError, match="finite"):
        built(cls, keys.split(1500))


def test_more_queries_than_are_held_at_once(monkeypatch):
    keys, queries = mismatched(3000, m=50)
    index = built(FaissPqIndex, [keys])
    whole = index.search(queries, 30)
    monkeypatch.setattr(faiss_index, "HITS", 1000)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole, index.search(queries, 30), strict=True))


def test_more_lists_than_keys_are_refused():
    keys, queries = mismatched(100)
    with pytest.raises(IndexBuildError, match="nlist=101 is more than the 100 keys. Use at most 100, or leave it out"):
        built(FaissIvfIndex, [keys], nlist=101)
    index = built(FaissIvfIndex, [keys], nlist=100, nprobe=1000)
    np.testing.assert_array_equal(index.search(queries, 10)[1], exact_ids(keys, queries, 10))


@pytest.mark.parametrize(("n", "nlist"), [(1, 1), (15, 1), (160, 10), (10_000, 400)])
def test_the_number_of_lists_follows_that_of_the_keys(n, nlist):
    assert 0.9 * nlist <= built(FaissIvfIndex, [mismatched(n)[0]]).index.nlist <= nlist  # empty ones are left out


def test_lists_that_are_not_read_leave_slots_empty():
    keys, queries = mismatched(2000)
    scores, ids = built(FaissIvfIndex, [keys], nlist=100, nprobe=1).search(queries, 500)
    assert (ids[:, 0] >= 0).all() and (ids[:, -1] == -1).all()
    assert (scores[ids == -1] == -torch.inf).all() and scores[ids >= 0].isfinite().all()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FaissIvfIndex, {"nlist": 0}),
        (FaissIvfIndex, {"nlist": 2**64}),
        (FaissIvfIndex, {"nprobe": 0}),
        (FaissIvfIndex, {"nprobe": 2**64}),
        (FaissIvfIndex, {"seed": -1}),
        (FaissPqIndex, {"k_factor": 0}),
        (FaissPqIndex, {"k_factor": 2**64}),
        (FaissPqIndex, {"device": "cuda"}),  # for which faiss has no such search
        *((cls, {"device": name}) for cls in ON_GPUS for name in ("gpu", "cuda:", "cuda:x", "cpu:0", "")),
    ],
    ids=str,
)
def test_wrong_options_are_refused(cls, options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        cls.Options(**options)


def test_a_wrong_option_is_an_error_of_the_configuration(monkeypatch):
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "faiss-flat")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__DEVICE", "gpu")
    with pytest.raises(ConfigError, match="MEMSTORE__INDEX__OPTIONS__DEVICE: .*'gpu'.* 'cuda', or one of several GPUs"):
        load_config().index_plugin()


@every_dtype
@learned
def test_another_process_learns_the_same(cls, dtype, tmp_path):
    here = digest_of_a_build(cls, dtype, tmp_path / "here")
    assert here == in_another_process(digest_of_a_build, cls, dtype, tmp_path / "there")


@learned
def test_another_seed_learns_something_else(cls, tmp_path):
    keys = mismatched(2000)[0]
    first, second = (digest(built(cls, [keys], seed=seed), tmp_path / "index") for seed in (0, 1))
    assert first != second


@every
@pytest.mark.parametrize("n", [3, faiss_pq.TRAINABLE])
def test_what_cannot_be_written_or_read_is_an_error_of_the_system(cls, n, tmp_path):
    check_errors_of_files(built(cls, [mismatched(n)[0]]), tmp_path, n)


PEAK = """
import threading, time, torch
from memstore import registry
from tests.backends.making import built

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    while True:
        peaks.append(anonymous())
        time.sleep(0.002)

keys = torch.randn(160_000, 128)  # 82 MB, beside which what does not grow with them is little
peaks = []
threading.Thread(target=watch, daemon=True).start()
for name, options in [("faiss-flat", {}), ("faiss-ivf", {"nlist": 300}), ("faiss-pq", {})]:
    cls = registry.load(registry.BACKENDS, name)
    built(cls, [keys[:2000]]).search(keys[:9], 9)
    before = anonymous()
    peaks.clear()
    index = built(cls, keys.split(4096), **options)
    print((max(peaks) - before) / keys.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_building_needs_little_more_memory_than_the_vectors():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    ratios = [float(ratio) for ratio in done.stdout.split()]
    assert len(ratios) == 3 and max(ratios) < 1.3


@on_gpus
def test_a_gpu_that_is_not_there_is_named(cls, monkeypatch):
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(IndexBuildError, match=r"device='cuda' needs faiss for GPUs: .*memstore-attention\[gpu\]"):
        built(cls, [torch.randn(9, 4)], device="cuda")
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    with pytest.raises(IndexBuildError, match="device='cuda:2' is not there, faiss finds 2 GPUs"):
        built(cls, [torch.randn(9, 4)], device="cuda:2")


@every_dtype
@on_gpus
def test_a_gpu_is_given_the_keys_as_float32(cls, dtype, monkeypatch, tmp_path):
    """With a stand-in for faiss's GPUs, since most machines have none."""
    moved: list[object] = []

    def to_gpu(resources, number, index):
        moved.append((resources, number))
        return index

    def full(resources, number, index):
        raise RuntimeError("out of memory")

    def to_cpu(index):
        moved.append("back")
        return index

    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    monkeypatch.setattr(faiss, "index_gpu_to_cpu", to_cpu, raising=False)
    faiss_gpu._resources.cache_clear()
    keys, queries = mismatched(3000)
    keys = keys.to(dtype)
    on_cpu, index = built(cls, [keys]), built(cls, [keys], device="cuda:1")
    assert moved == [("resources", 1)]
    assert type(index.index) in (faiss.IndexFlatIP, faiss.IndexIVFFlat)
    assert recall(index.search(queries, 40)[1], exact_ids(keys, queries, 40)) >= 0.95
    assert index.block_maxima(queries, 64).shape == (24, 47)
    with pytest.raises(QueryError, match="k=2049: faiss finds at most 2,048 keys on a GPU"):
        index.search(queries, 2049)
    index.save(tmp_path / "index")
    assert moved[1:] == ["back"]
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", full)
    with pytest.raises(IndexBuildError, match="cannot be brought to device='cuda:1': out of memory"):
        index.load(tmp_path / "index")
    on_cpu.load(tmp_path / "index")
    assert torch.equal(index.search(queries, 40)[1], on_cpu.search(queries, 40)[1])
    faiss_gpu._resources.cache_clear()


@every_dtype
def test_inverted_lists_are_widened_without_loss(dtype):
    keys = mismatched(3000)[0]
    index = built(FaissIvfIndex, [keys.to(dtype)]).index
    wide = widened(index)
    wide.make_direct_map()
    assert isinstance(wide, faiss.IndexIVFFlat) and wide.ntotal == 3000
    assert (wide.reconstruct_n(0, 3000) == keys.to(dtype).float().numpy()).all()


@needs_gpu
@every_dtype
@on_gpus
def test_on_a_gpu(cls, dtype, tmp_path):
    keys, queries = mismatched(3000)
    keys = keys.to(dtype)
    index = built(cls, keys.split(1000), device="cuda:0")
    index.save(tmp_path / "index")
    loaded = cls(cls.Options(device="cuda"))
    loaded.load(tmp_path / "index")
    for each in (index, loaded):
        scores, ids = each.search(queries.cuda(), 50)
        assert scores.device.type == ids.device.type == "cuda"
        assert recall(ids.cpu(), exact_ids(keys, queries, 50)) >= 0.95
