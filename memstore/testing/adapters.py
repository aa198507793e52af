"""The contract of a model adapter: :class:`memstore.interfaces.ModelAdapter`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

import memstore
from memstore.errors import AttachError, CheckError, ConfigError
from memstore.interfaces import ModelAdapter
from memstore.manifest import WindowRule, storable
from memstore.slots import slots
from memstore.testing.adapter_steps import Stop, in_use, logits, logits_of, read_memory, shake
from memstore.testing.checks import refused
from memstore.testing.processes import in_another_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from memstore.attachment import Attachment
    from memstore.store import MemoryStore

WRONG_RULES: list[tuple[Any, Any]] = [
    *[(0, None), (-1, None), (True, None), (2.5, None), ("8", None)],
    *[(8, 8), (8, 9), (8, -1), (8, 2.5)],
]
WRONG_OPTIONS: list[dict[str, Any]] = [{"no_such_option": 1}, {"layers": []}, {"layers": [999]}]


class ModelAdapterContract:
    """All that :class:`memstore.interfaces.ModelAdapter` promises. Set ``adapter`` and give :meth:`make_model`, in a
    class whose name begins Test; the adapter need not be installed.

    The model is ``self.model`` in each test. It must have at least 48 positions, and a head that gives logits.
    """

    adapter: ClassVar[type[ModelAdapter]]
    model: PreTrainedModel
    _model: ClassVar[PreTrainedModel]  # made once for all tests of a class

    def make_model(self) -> PreTrainedModel:
        """A tiny random model, best with encoder and decoder of different depth and biases that are not zero."""
        raise NotImplementedError("make_model must return a tiny random model.")

    def document(self) -> dict[str, Any]:
        """What ``store.encode`` is given beside the model: a document of one window, here random token ids [40]."""
        return {"input_ids": self.token_ids(40)}

    def prompt(self) -> dict[str, Tensor]:
        """What the model is asked beside the document: here random token ids [1, 6], for the decoder if it has one."""
        name = "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"
        return {name: self.token_ids(6)[None]}

    def token_ids(self, count: int) -> Tensor:
        """Random ids [count] of the model's vocabulary that stand for nothing special."""
        config = self.model.config
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        special = {getattr(config, name, None) for name in names}
        plain = torch.tensor([i for i in range(config.vocab_size) if i not in special])
        return plain[torch.randint(len(plain), (count,), generator=torch.Generator().manual_seed(count))]

    @pytest.fixture(autouse=True)
    def _made(self) -> Iterator[None]:
        if "_model" not in vars(type(self)):
            torch.manual_seed(0)
            type(self)._model = self.make_model().eval()
        self.model = copy.deepcopy(self._model)
        with in_use(self.adapter):
            yield

    @pytest.fixture
    def library(self, tmp_path: Path) -> Iterator[MemoryStore]:
        """An empty store."""
        with memstore.open(tmp_path / "library") as library:
            yield library

    def test_it_knows_its_models(self) -> None:
        known, model_type = self.adapter.model_types, self.model.config.model_type
        assert isinstance(known, tuple), f"model_types is {known!r}, and must be a tuple."
        served = model_type in known or (not known and self.adapter.serves_unknown(self.model))
        assert served, f"The model of this test has model_type {model_type!r}, which is not in {known}."
        assert self.adapter.kind, "kind must say what a memory holds."
        bound = self.adapter(self.model)
        assert bound.native_window > 0, f"native_window is {bound.native_window}, and must be a number of tokens."

    def test_parts_describe_what_encode_returns(self) -> None:
        adapter, windows = self.adapter(self.model), self.windows()
        encoded = self.encoded(windows)
        for dtype in storable(self.adapter.kind):
            parts = adapter.parts(dtype)
            summaries = {name: spec for name, spec in parts.items() if spec.every > 1}
            named = parts.keys() - summaries.keys()
            assert named == encoded.keys(), f"parts() names {sorted(named)}, and encode() returns {[*encoded]}."
            made = adapter.summaries({name: rows[0] for name, rows in encoded.items()})
            shapes = {name: tuple(rows.shape) for name, rows in made.items()}
            due_of = {name: (spec.num_rows(self.num_tokens()), *spec.shape) for name, spec in summaries.items()}
            assert shapes == due_of, f"summaries() returns {shapes}, and parts() asks for {due_of}."
            for name in encoded:
                spec = parts[name]
                assert spec.dtype == dtype, f"parts({dtype!r}) says that {name!r} is stored as {spec.dtype}."
                due, shape = (2, self.num_tokens(), *spec.shape), tuple(encoded[name].shape)
                assert shape == due, f"encode() of two windows returns {name!r} of shape {shape}, and should {due}."
        for name, rows in encoded.items():
            assert rows.isfinite().all(), f"encode() returns NaN or infinite values in {name!r}."

    def test_a_window_is_encoded_alike_whenever_and_with_whatever(self) -> None:
        """To the bit when repeated, as an encoding that is resumed must be; up to rounding in another batch."""
        windows = self.windows()
        together, again = self.encoded(windows), self.encoded(windows)
        for name, rows in together.items():
            assert torch.equal(rows, again[name]), f"{name!r} of the same windows differs from one call to the next."
        for i in range(2):
            for name, rows in self.encoded(windows[i : i + 1]).items():
                error, most = (rows[0] - together[name][i]).abs().max(), 1e-4 * together[name].abs().max()
                assert error <= most, f"{name!r} of a window differs by {error:.3g} if another is read beside it."

    def test_weights_are_those_that_decide_what_is_encoded(self) -> None:
        adapter, windows = self.adapter(self.model), self.windows()
        weights = adapter.weights()
        assert weights, "weights() must give the tensors that encode() depends on, for the fingerprint."
        own = {tensor.data_ptr() for tensor in weights.values()}
        others = [tensor for tensor in self.model.state_dict().values() if tensor.data_ptr() not in own]
        before = self.encoded(windows)
        shake(others)
        for name, rows in self.encoded(windows).items():
            assert torch.equal(rows, before[name]), f"{name!r} depends on tensors of the model that weights() lacks."
        shake(list(weights.values()))
        after = self.encoded(windows)
        assert not any(torch.equal(after[name], before[name]) for name in before), "weights() decide nothing."

    def test_a_rule_has_defaults_and_takes_what_fits(self) -> None:
        adapter, tokens = self.adapter(self.model), self.num_tokens()
        rule = adapter.rule(None, None)
        assert isinstance(rule, WindowRule), f"rule() returns {type(rule).__name__}, and must return a WindowRule."
        assert rule.window <= adapter.native_window, "The default window is longer than what the model reads at once."
        assert rule.overlap < rule.window, "The default overlap must be less than the window."
        given = adapter.rule(tokens, 1)
        assert (given.window, given.overlap) == (tokens, 1), f"rule({tokens}, 1) gives {given}."

    def test_a_wrong_rule_is_refused(self) -> None:
        adapter = self.adapter(self.model)
        for window, overlap in WRONG_RULES:
            with refused(ConfigError, f"window={window!r} with overlap={overlap!r}"):
                adapter.rule(window, overlap)

    def test_a_memory_reads_like_its_document(self, library: MemoryStore) -> None:
        """A document of one window, against the model that has document and prompt before it."""
        with torch.no_grad():
            expected, bare = self.plain(), self.bare()
        with self.attached(library) as attached:
            read = logits(self.model, attached, self.prompt())
        tolerance = (1e-4 if self.model.config.is_encoder_decoder else 1e-3) * max(1, float(expected.abs().max()))
        error = float((read - expected).abs().max())
        assert error <= tolerance, f"Logits differ from the plain model's by {error:.3g}; {tolerance:.3g} is allowed."
        assert not torch.equal(read, bare), "The memory changes nothing: is its attention ever called?"

    def test_generation_goes_on_like_the_plain_models(self, library: MemoryStore) -> None:
        settings: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
        ids, prompt = self.document().get("input_ids"), self.prompt()
        generate: Any = self.model.generate
        if self.model.config.is_encoder_decoder:
            expected = generate(**self.batch(), **settings)
        else:
            assert ids is not None
            expected = generate(input_ids=torch.cat((ids[None], prompt["input_ids"]), dim=1), **settings)[:, len(ids) :]
            settings["input_ids"] = prompt["input_ids"]
        with self.attached(library) as attached:
            written = attached.generate(**settings)
        assert torch.equal(written, expected), f"Greedy generation gives {written.tolist()}, not {expected.tolist()}."

    @pytest.mark.parametrize("leave", ["normally", "by an exception"])
    def test_nothing_is_left_behind(self, library: MemoryStore, leave: str) -> None:
        with torch.no_grad():
            before, windows = self.bare(), self.encoded(self.windows())
        try:
            with self.attached(library) as attached:
                logits(self.model, attached, self.prompt())
                if leave == "by an exception":
                    raise Stop
        except Stop:
            pass
        with torch.no_grad():
            assert torch.equal(self.bare(), before), f"Left {leave}, the model does not give what it gave before."
        for name, rows in self.encoded(self.windows()).items():
            assert torch.equal(rows, windows[name]), f"Left {leave}, the model encodes {name!r} otherwise."

    def test_wrong_options_are_refused(self, library: MemoryStore) -> None:
        memory = library.encode(self.model, name="doc", **self.document())
        for options in WRONG_OPTIONS:
            with refused(AttachError, f"Attaching with {options}"):
                memstore.attach(self.model, memory, **options)

    def test_queries_are_a_sample_that_fits_the_keys(self, library: MemoryStore) -> None:
        """By which `memstore check` judges an index."""
        adapter = self.adapter(self.model)
        memory = library.encode(self.model, name="doc", **self.document())
        with memory.open() as opened:
            try:
                sample = adapter.queries(opened)
            except CheckError:
                pytest.skip(f"{self.adapter.__name__} gives no sample of queries")
            again = adapter.queries(opened)
            widths = {slot.layer: slot.keys(opened)[0].shape[1] for slot in slots(memory.manifest)}
            with memstore.attach(self.model, memory), refused(AttachError, "queries() while a memory is attached"):
                adapter.queries(opened)
        layers = sample.keys() if None in widths else widths.keys()  # encoder states are those of all layers
        assert sample, "A sample of queries must be that of at least one layer."
        assert sample.keys() == layers, f"Queries are those of layers {[*sample]}, not {[*layers]}."
        for layer, queries in sample.items():
            width = widths.get(layer, widths.get(None))
            fits = queries.dim() == 3 and queries.dtype == torch.float32 and queries.shape[2] == width
            assert fits, f"Queries are {queries.dtype} {[*queries.shape]}, and must be float32 [m, num_heads, {width}]."
            assert queries.isfinite().all(), f"Queries of layer {layer} are NaN or infinite."
            assert torch.equal(queries, again[layer]), f"Queries of layer {layer} differ from one call to the next."

    def test_another_process_reads_the_same(self, library: MemoryStore) -> None:
        with self.attached(library) as attached:
            expected = logits(self.model, attached, self.prompt())
        read = in_another_process(read_memory, self.adapter, self.model, library.path, self.options, self.prompt())
        assert torch.equal(read, expected), "The memory reads otherwise in a process that has not written it."

    @property
    def options(self) -> Mapping[str, Any]:
        """With these a memory of one window is read whole."""
        return {"top_k": "all"}

    @contextmanager
    def attached(self, library: MemoryStore) -> Iterator[Attachment]:
        """The document's memory, attached to the model."""
        memory = library.encode(self.model, name="doc", **self.document())
        with memstore.attach(self.model, memory, **self.options) as attached:
            yield attached

    def batch(self) -> dict[str, Tensor]:
        """The document as the model itself is given it."""
        return {name: value[None] if name == "input_ids" else value for name, value in self.document().items()}

    def bare(self) -> Tensor:
        """Logits without the memory: of the prompt alone, or of an encoder-decoder that has another document."""
        other = {name: value.flip(-1) for name, value in self.batch().items()}
        return logits_of(self.model(**(other if self.model.config.is_encoder_decoder else {}), **self.prompt()))

    def plain(self) -> Tensor:
        """Logits of the plain model that has read the document in the usual way."""
        if self.model.config.is_encoder_decoder:
            return logits_of(self.model(**self.batch(), **self.prompt()))
        document, prompt = self.batch()["input_ids"], self.prompt()["input_ids"]
        return logits_of(self.model(input_ids=torch.cat((document, prompt), dim=1)))[:, document.shape[1] :]

    def windows(self) -> Tensor:
        """Two windows [2, w, …] of equal length: the document, and the same backwards."""
        window = self.batch().get("input_ids")
        if window is None:
            window, _ = self.adapter(self.model).feature_windows(self.document()["input_features"])
        return torch.cat((window, window.flip(-1)))

    def num_tokens(self) -> int:
        """Tokens of the document."""
        if "input_ids" in self.document():
            return len(self.document()["input_ids"])
        return self.adapter(self.model).feature_windows(self.document()["input_features"])[1]

    def encoded(self, windows: Tensor) -> dict[str, Tensor]:
        """What the adapter makes of windows."""
        with torch.no_grad():
            return self.adapter(self.model).encode(windows)
