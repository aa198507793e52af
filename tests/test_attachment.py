"""The binding of memories to a model: what may be attached, and that nothing of it is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch

import memstore
from memstore import hooks
from memstore.errors import (
    AttachError,
    DamagedMemoryError,
    FingerprintMismatchError,
    HookError,
    MemoryNotFoundError,
    StoreError,
    StoreInUseError,
)
from tests import tiny
from tests.models import build, read, run, set_attention, tokens
from tests.store import making

FAMILIES = ["bart", "t5", "llama", "mistral-sliding"]
SEQ2SEQ = ["bart", "t5"]
DECODER_ONLY = ["llama", "mistral-sliding"]
ANSWER = """
import sys
import memstore, torch
from tests.models import build, run
with memstore.open(sys.argv[1], "r") as library:
    for family in sys.argv[2:]:
        model = build(family)
        with memstore.attach(model, library[family]):
            print(run(model).double().flatten().tolist())
"""


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def traces(model):
    """Everything an attachment could leave on a model."""
    marks: list[Any] = [hooks._switched.copy(), len(hooks._readers)]
    configs: dict[int, Any] = {}
    for module in model.modules():
        marks.append([len(each) for each in (module._forward_pre_hooks, module._forward_hooks, module.__dict__)])
        marks.append(id(config := getattr(module, "config", None)))
        configs[id(config)] = config
    return marks + [(config._attn_implementation, repr(config)) for config in configs.values() if config is not None]


class Stop(Exception):  # noqa: N818
    """Raised inside an attachment."""


@pytest.mark.parametrize("leave", ["normally", "by an exception", "by a failed step", "while entering"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_nothing_is_left_behind(library, model, monkeypatch, implementation, leave):
    gc.collect()
    set_attention(model, implementation)
    memory, before, expected = read(library, model), traces(model), run(model)
    if leave == "normally":
        with memstore.attach(model, memory):
            assert not torch.equal(run(model), expected)
            assert traces(model) != before
    elif leave == "by an exception":
        with pytest.raises(Stop), memstore.attach(model, memory):
            run(model)
            raise Stop
    elif leave == "by a failed step":
        with pytest.raises(IndexError), memstore.attach(model, memory), torch.no_grad():
            model(input_ids=torch.tensor([[9999]]), decoder_input_ids=torch.tensor([[5]]))
    else:
        attachment = memstore.attach(model, memory)
        monkeypatch.setattr(attachment, "_stage", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError), attachment:
            pass
    assert traces(model) == before and not hooks._switched and not len(hooks._readers)
    assert torch.equal(run(model), expected)
    library.close()  # which would be refused if the memory were still open


def test_a_damaged_memory_is_noticed_on_entering(library, model):
    memory, before, expected = read(library, model), traces(model), run(model)
    data = next(library.path.glob("memories/*/data.mdb"))
    whole = bytearray(data.read_bytes())
    with memory.open("off") as opened:
        part = next(iter(memory.manifest.parts))
        at = whole.find(opened.block(part, 0).numpy().tobytes())
    whole[at + 100] ^= 1
    data.write_bytes(whole)
    with pytest.raises(DamagedMemoryError, match="read its document again"), memstore.attach(model, memory):
        run(model)
    assert traces(model) == before and torch.equal(run(model), expected)


def test_one_attachment_at_a_time(library, model):
    one, two = read(library, model), read(library, model, "other")
    with memstore.attach(model, one) as attached:
        expected = run(model)
        with pytest.raises(AttachError, match="leave that attachment first"), memstore.attach(model, two):
            pass
        with pytest.raises(AttachError, match="in use already"), attached:
            pass
        assert torch.equal(run(model), expected)
    with attached:  # and again later
        assert torch.equal(run(model), expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_models_at_the_same_time(library, model, shared, first_out):
    other = copy.deepcopy(model)
    if shared:  # one configuration object decides for both
        for module, twin in zip(other.modules(), model.modules(), strict=True):
            if hasattr(module, "config"):
                module.config = twin.config
    models, memories = [model, other], [read(library, model), read(library, other, "other")]
    plain, before, alone = run(model), traces(model), []
    for each, memory in zip(models, memories, strict=True):
        with memstore.attach(each, memory):
            alone.append(run(each))
            assert torch.equal(run(models[1 - models.index(each)]), plain)
    attachments = [memstore.attach(each, memory) for each, memory in zip(models, memories, strict=True)]
    for attachment in attachments:
        attachment.__enter__()
    for each, expected in zip(models, alone, strict=True):
        assert torch.equal(run(each), expected)
    attachments[first_out].__exit__(None, None, None)
    assert torch.equal(run(models[first_out]), plain)
    assert torch.equal(run(models[1 - first_out]), alone[1 - first_out])
    attachments[1 - first_out].__exit__(None, None, None)
    assert traces(model) == before and torch.equal(run(other), plain)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_encoding_while_attached_gives_the_same_bytes(library, family):
    model = build(family)
    memory = read(library, model)
    with memstore.attach(model, memory):
        again = library.encode(model, input_ids=memory.token_ids.tolist(), name="again")
    assert again.manifest.digest == memory.manifest.digest


def test_written_in_one_process_and_read_in_another(library):
    """All in one other process, which takes longer to start than to read."""
    families = ["bart", "t5", "llama"]
    expected = []
    for family in families:
        model = build(family)
        with memstore.attach(model, read(library, model, family)):
            expected.append(run(model).double().flatten().tolist())
    library.close()
    assert making.in_child(ANSWER, library.path, *families).split("\n")[:-1] == [str(each) for each in expected]


def test_eager_and_sdpa_read_the_same(library, model):
    memory, outputs = read(library, model), []
    for implementation in ("eager", "sdpa"):
        set_attention(model, implementation)
        with memstore.attach(model, memory):
            outputs.append(run(model))
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


def test_gradients_flow_through_what_is_read(library, model):
    """The same gradient as by finite differences, for a weight that only changes the query."""
    memory = read(library, model)
    layer = model.get_decoder().block[0].layer[1].EncDecAttention.q if model.config.model_type == "t5" else None
    if layer is None:
        first = model.get_decoder().layers[0]
        layer = (first.encoder_attn if model.config.is_encoder_decoder else first.self_attn).q_proj
    inputs = {"input_ids": tokens(9, seed=1, rows=1), "decoder_input_ids": tokens(5, seed=2, rows=1)}
    if not model.config.is_encoder_decoder:
        del inputs["decoder_input_ids"]
    with memstore.attach(model, memory):
        model(**inputs).logits[0, -1, 7].backward()
        gradient = layer.weight.grad[0, 0].item()
        assert gradient != 0
        sides = []
        for step in (1e-2, -2e-2):
            with torch.no_grad():
                layer.weight[0, 0] += step
                sides.append(model(**inputs).logits[0, -1, 7].item())
    assert (sides[0] - sides[1]) / 2e-2 == pytest.approx(gradient, rel=0.1, abs=2e-4)


def test_rows_that_do_not_divide_the_batch_are_refused(library, model):
    rows = [[read(library, model, name)] for name in ("a", "b")]
    with memstore.attach(model, rows=rows):
        run(model, rows=4)
        with pytest.raises(AttachError, match="a batch of 3 cannot be shared out"):
            run(model, rows=3)
        run(model, rows=2)


def test_beams_of_one_row_are_not_taken_for_further_rows(library, model):
    rows = [[read(library, model, name)] for name in ("a", "b")]
    settings: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False}
    with memstore.attach(model, rows=rows) as attached:
        assert len(attached.generate(input_ids=tokens(9, seed=1, rows=2), **settings)) == 2
        for use in (
            lambda: attached.generate(input_ids=tokens(9, seed=1, rows=1), **settings),
            *([attached.empty_prompt] if model.config.is_encoder_decoder else []),
        ):
            with pytest.raises(AttachError, match="a batch of 1 cannot be shared out"):
                use()
        with pytest.raises(AttachError, match="that of one row"):
            attached.generate(tokenizer=tiny.tokenizer(), **settings)


def test_a_memory_that_is_removed_while_attached_still_explains(library):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    memory = library.encode(model, tokenizer, "In the beginning was the word.", name="doc")
    with memstore.attach(model, memory, explain=True) as attached:
        del library["doc"]
        attached.generate("Who?", tokenizer=tokenizer, max_new_tokens=2)
        assert attached.provenance()[0].end_char == 30


def test_memories_that_are_gone(library, model):
    memory, other = read(library, model), read(library, model, "other")
    attachment = memstore.attach(model, other)
    del library["other"]
    before = traces(model)
    with pytest.raises(MemoryNotFoundError, match="'other' has been removed"), attachment:
        pass
    with memstore.attach(model, memory):
        expected = run(model)
        del library["doc"]
        assert "doc" not in library and torch.equal(run(model), expected)
        with pytest.raises(StoreInUseError):
            library.close()
        assert torch.equal(run(model), expected)
    assert traces(model) == before
    library.close()
    with pytest.raises(StoreError, match="closed"), memstore.attach(model, memory):
        pass


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 0.1), (torch.float16, 0.1), (torch.float64, 1e-5)])
def test_a_model_that_changes_its_dtype_while_attached_reads_on(library, model, dtype, close):
    memory = read(library, model)
    with memstore.attach(model, memory) as attached:
        expected = run(model)
        model.to(dtype)
        assert (run(model).float() - expected).abs().max() < close * expected.abs().max()
        with pytest.raises(FingerprintMismatchError, match="compute_dtype"):
            attached.add(read(library, build(model_name(model)), "other"))


def model_name(model):
    return "mistral-sliding" if model.config.model_type == "mistral" else model.config.model_type


def test_a_model_that_is_moved_while_attached_is_refused(library, model):
    with memstore.attach(model, read(library, model)):
        run(model)
        model.to("meta")
        for _ in range(2):
            with pytest.raises(AttachError, match="was moved from cpu to meta while memories are attached"):
                run(model)
    assert not hooks._switched and not len(hooks._readers)


EXCHANGED: dict[str, Any] = {
    "a projection": lambda layer, name: setattr(getattr(layer, name), "k_proj", torch.nn.Linear(48, 48)),
    "the attention": lambda layer, name: setattr(layer, name, copy.deepcopy(getattr(layer, name))),
}


@pytest.mark.parametrize("what", [*EXCHANGED, "the layer"])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_part_that_is_exchanged_while_attached_is_noticed(library, family, what):
    model = build(family)
    memory, layers = read(library, model), model.base_model.get_decoder().layers
    twin = copy.deepcopy(layers[1])
    with memstore.attach(model, memory):
        run(model)
        if what == "the layer":
            layers[1] = twin
        else:
            EXCHANGED[what](layers[1], "encoder_attn" if family == "bart" else "self_attn")
        with pytest.raises(AttachError, match=r"layers.1.* was exchanged while memories are attached"):
            run(model)
    if what != "a projection":
        with memstore.attach(model, memory):
            run(model)


@pytest.mark.parametrize("way", ["written in place", "a new parameter"])
def test_weights_that_change_while_attached_are_those_that_read(library, way):
    model = build("bart")
    memory, values = read(library, model), torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    attention = model.model.decoder.layers[1].encoder_attn
    with memstore.attach(model, memory):
        before = run(model)
        for projection in (attention.k_proj, attention.v_proj):
            if way == "written in place":
                projection.weight.data.copy_(values)
            else:
                projection.weight = torch.nn.Parameter(values)
        changed = run(model)
    assert not torch.equal(changed, before)
    with memstore.attach(model, memory):
        assert torch.equal(run(model), changed)


def test_training_reads_without_dropout_of_attention(library):
    """All other dropout is as usual; here there is none."""
    model = build("bart")
    memory = read(library, model)
    with memstore.attach(model, memory):
        expected = run(model)
        model.train()
        for module in model.modules():
            for name in ("dropout", "activation_dropout", "encoder_layerdrop", "layerdrop"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        for layer in model.model.decoder.layers:
            layer.encoder_attn.dropout = 0.9
        assert torch.equal(run(model), expected)
    assert not torch.equal(run(model), run(model))


def test_attention_that_never_calls_the_interface_is_noticed(library, model):
    memory = read(library, model)
    with memstore.attach(model, memory) as attached:
        for module in list(attached._readers()):
            own: Any = copy.deepcopy(module.config)
            own._attn_implementation = "sdpa"
            module.config = own  # not the one that is switched
        with pytest.raises(HookError, match="needs an adapter of its own"):
            run(model)


def test_an_implementation_chosen_while_attached_is_noticed(library, model):
    memory, expected = read(library, model), run(model)
    with memstore.attach(model, memory):
        set_attention(model, "eager")
        with pytest.raises(HookError):
            run(model)
    chosen = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
    assert chosen == {"eager"}
    torch.testing.assert_close(run(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickle.dumps])
def test_what_is_bound_to_a_store_or_a_model_is_not_copied(library, model, clone):
    memory = read(library, model)
    with memory.open() as opened, memstore.attach(model, memory) as attached:
        for each in (library, memory, opened, attached, model):
            with pytest.raises((StoreError, AttachError), match="cannot be copied or pickled"):
                clone(each)
    clone(model)


def test_a_configuration_copied_while_attached_names_no_memory(library, model):
    memory = read(library, model)
    with memstore.attach(model, memory, layers=[0]):
        expected = run(model)
        other = type(model)(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict())
    with memstore.attach(other, memory, layers=[0]):
        assert torch.equal(run(other), expected)
    assert other.config._attn_implementation == "sdpa"


def test_what_is_saved_while_attached_loads_without_memstore(library, model, tmp_path):
    with memstore.attach(model, read(library, model)):
        model.save_pretrained(tmp_path / "model")
    assert "memstore" not in (tmp_path / "model" / "config.json").read_text()


def test_two_threads_at_once_are_refused_and_one_after_the_other_is_not(library, model):
    answers: list[Any] = []

    def other():
        try:
            answers.append(run(model))
        except AttachError as error:
            answers.append(error)

    def in_a_thread(*unused):
        if threading.current_thread() is threading.main_thread():  # a step of that thread would start another
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    def fail(*unused):
        raise Stop

    with memstore.attach(model, read(library, model), top_k="all") as attached:
        expected = run(model)
        inside = next(iter(attached._readers())).register_forward_hook(in_a_thread)
        assert torch.equal(run(model), expected)
        inside.remove()
        assert answers and all("one at a time" in str(answer) for answer in answers)
        stop = attached._stage().register_forward_hook(fail)
        with pytest.raises(Stop):
            run(model)
        stop.remove()
        answers.clear()
        in_a_thread()
        assert torch.equal(answers[0], expected)


def test_a_step_that_failed_leaves_no_empty_prompt_behind(library):
    """A decoder that is called by itself reads the states that it is given, as before."""
    model = build("bart")
    states = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(0))
    asking: dict[str, Any] = {"input_ids": tokens(3, rows=1), "encoder_hidden_states": states}
    with memstore.attach(model, read(library, model)) as attached, torch.no_grad():
        before = model.get_decoder()(**asking).last_hidden_state
        with pytest.raises(IndexError):
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=torch.full((1, 3), 10**6))
        assert torch.equal(model.get_decoder()(**asking).last_hidden_state, before)
