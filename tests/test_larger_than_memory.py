"""A memory larger than what a process may hold is attached, and what is read of it is right."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memstore
from memstore import describe
from memstore.families import DecoderOnlyAdapter
from memstore.memory_writer import token_parts
from tests.store import making

TOKENS, LAYERS, WIDTH, VOCAB = 65_536, 8, 32, 64
ROOM = 32 << 20  # bytes that the process may allocate beside what it holds before it opens the memory

# argv: the store. Linux counts private writable memory, and no mapped file, as data.
IN_LITTLE_ROOM = f"""
import json, resource, sys
from pathlib import Path
import torch
import memstore
from memstore import open_memory
from tests import test_larger_than_memory as test

model, prompt = test.model(), torch.arange(8)[None]
with torch.no_grad():
    model(input_ids=prompt)  # what a first call allocates for good
held = int(next(line for line in Path("/proc/self/status").open() if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (held + {ROOM}, resource.RLIM_INFINITY))
try:
    torch.ones({2 * ROOM}, dtype=torch.uint8)
    raise SystemExit("the limit does not hold")
except RuntimeError:
    pass
store = memstore.open(sys.argv[1], mode="r")
memory = store["long"]
result = {{"nbytes": memory.nbytes, "wrong": test.wrong_rows(memory)}}
open_memory._checked.clear()
verified, real = [], open_memory.checksum
open_memory.checksum = lambda value: verified.append(len(value)) or real(value)
result["logits"], result["verified"] = test.answer(model, memory), sum(verified)
print(json.dumps(result))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's RLIMIT_DATA")


def model() -> LlamaForCausalLM:
    """Small, but for what it keeps of a token: 1 KiB in int8."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=2048,
    )
    made = LlamaForCausalLM(config)
    made.eval()
    return made


def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))


def table(part: str) -> torch.Tensor:
    """[VOCAB, 2, WIDTH]: what is kept of each token id, wherever it stands."""
    generator = torch.Generator().manual_seed(sum(map(ord, part)))
    return torch.randn(VOCAB, 2, WIDTH, generator=generator)


def wrong_rows(memory: memstore.memory.Memory) -> int:
    """How many of some spans' rows differ from the table by more than the coding may."""
    wrong = 0
    with memory.open() as opened:
        for part in token_parts(memory.manifest):
            for start in (0, 4064, TOKENS - 64):  # the second one lies in two records
                wanted = table(part)[ids()[start : start + 64]]
                wrong += int(((opened.rows(part, start, start + 64).float() - wanted).abs() > 0.03).any((1, 2)).sum())
    return wrong


def answer(model: LlamaForCausalLM, memory: memstore.memory.Memory) -> list[float]:
    with memstore.attach(model, memory, budget=256) as _, torch.no_grad():
        logits: list[float] = model(input_ids=torch.arange(8)[None]).logits[0, -1].tolist()
    return logits


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A memory of 70 MB, made without computing anything."""

    def looked_up(self, windows):
        return {part: table(part)[windows] for part, spec in self.parts("int8").items() if spec.every == 1}

    with memstore.open(tmp_path_factory.mktemp("large") / "library") as store:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecoderOnlyAdapter, "encode", looked_up)
            patch.setattr(describe, "BLOCK_BYTES", 5 << 20)  # records of 4,096 tokens, as those of SmolLM2
            store.encode(model(), input_ids=ids(), name="long", dtype="int8", window=1024, overlap=0, batch_size=8)
        yield store


def test_a_memory_larger_than_the_room_is_attached_and_read_right(library):
    result = json.loads(making.in_child(IN_LITTLE_ROOM, library.path))
    assert result["nbytes"] > 2 * ROOM and result["wrong"] == 0
    assert result["verified"] < 0.75 * result["nbytes"]  # keys of random tokens are alike wherever they stand
    torch.testing.assert_close(torch.tensor(result["logits"]), torch.tensor(answer(model(), library["long"])))
