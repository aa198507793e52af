"""Checking an index, and tuning it, by what the model itself asks of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from memstore import quality
from memstore.attaching import check_fit
from memstore.auto import reaches
from memstore.config import load as load_config
from memstore.errors import CheckError
from memstore.indexes import open_index, remember
from memstore.interfaces import BLOCK_SEARCH, VectorIndex
from memstore.open_memory import OpenMemory
from memstore.quality import Exact, Quality
from memstore.query_sample import query_sample
from memstore.reading.passes import device_of
from memstore.reading.selection import BLOCK
from memstore.registry import adapter_for
from memstore.slots import Slot, slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from memstore.interfaces import ModelAdapter
    from memstore.store import MemoryStore

LITTLE = 0.5  # of all attention: if the exact top k hold less than that, k is too small


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class LayerQuality(Quality):
    """The quality of a search for the queries of one decoder layer."""

    layer: int


class Trial(_Facts):
    """What an index reached with these values of its tunable options."""

    options: dict[str, int]
    total: Quality


class Tuning(_Facts):
    """The trials, cheapest first, and the options that were chosen and stored: the first that reached the target, else
    the best."""

    target_mass: float
    reached: bool
    options: dict[str, int]
    trials: list[Trial]


class CheckReport(_Facts):
    """How well one index finds what the model looks for in one memory.

    k: keys searched for each query. options: those of the index, as they were checked. notes: what a reader of these
    numbers should know.
    """

    name: str
    kind: str
    num_tokens: int
    backend: str
    options: dict[str, Any]
    k: int
    layers: list[LayerQuality]
    total: Quality
    tuning: Tuning | None
    notes: list[str]


@dataclass(frozen=True)
class _Question:
    """What one layer asks of one index: queries [m, d] of its keys and values in blocks, and the exact answer."""

    layer: int
    slot: Slot
    index: VectorIndex
    keys: list[Tensor]
    values: list[Tensor]
    queries: Tensor
    truth: Exact


def check(
    store: MemoryStore,
    name: str,
    model: PreTrainedModel,
    *,
    backend: str | None = None,
    k: int | None = None,
    tune: bool = False,
    target_mass: float | None = None,
) -> CheckReport:
    """Hold an index of a memory against exact search, by a sample of what ``model`` asks of the memory.

    backend: the index, None for the configured one. k: keys searched for each query, by default what reading asks for
    (the model's own window of encoder states, 1,024 keys of a decoder-only model), never more than the memory has.
    tune: try the values of the backend's tunable options, cheapest first, until the index keeps ``target_mass`` (None:
    ``index.auto.target_mass`` of the configuration, 0.99) of the attention mass that exact search with the same k
    captures, and store these values with the index; if none does, the best ones.

    Raises MemoryNotFoundError, FingerprintMismatchError for a model that did not write the memory, CheckError for what
    cannot be checked, ReadOnlyStoreError for tuning in a read-only store, and what opening an index raises.
    """
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise CheckError(f"k={k!r} must be a whole number of at least 1.")
    if target_mass is not None and not (tune and 0 < target_mass <= 1):
        raise CheckError(
            f"target_mass={target_mass!r} must be above 0 and at most 1, and it is for tuning (tune=True)."
        )
    if tune:
        store.check_writable()
    memory = store[name]
    adapter: ModelAdapter = adapter_for(model)(model)
    check_fit([memory], adapter, strict=True)
    wanted = k if k is not None else adapter.native_window if memory.kind == "hidden" else BLOCK_SEARCH
    k = min(wanted, memory.num_tokens)
    with memory.open() as opened:
        sample = query_sample(opened, adapter)
        device = device_of(model)
        # As an attachment does: encoder states are searched on the model's device, keys where the store has them.
        on_device = (
            {"hidden": [block.to(device) for block in opened.blocks("hidden")]} if memory.kind == "hidden" else {}
        )
        index = open_index(opened, backend, on_device, str(device) if on_device else "cpu")
        questions = _questions(opened, index.indexes, {layer: q.to(device) for layer, q in sample.items()}, k)
        auto, tuning = load_config().settings.index.auto, None
        if tune:
            tuning, layers = _tune(questions, k, auto.target_mass if target_mass is None else target_mass)
        else:
            layers = _measure(questions, k)
        total = quality.mean(layers)
        if tuning and (tuning.options or index.record):  # an index that is kept may be chosen for its quality
            small = open_index(opened, auto.small, on_device)
            measured = {
                "k": k,
                "target_mass": tuning.target_mass,
                "reached": tuning.reached,
                **total.model_dump(),
                "reading_us": _reading_us(questions, index.indexes, k),
                "small_reading_us": _reading_us(questions, small.indexes, k),
            }
            remember(memory, index, tuning.options, measured)
        options = questions[0].index.options.model_dump(mode="json")
    return CheckReport(
        name=name,
        kind=memory.kind,
        num_tokens=memory.num_tokens,
        backend=index.backend,
        options=options,
        k=k,
        layers=layers,
        total=total,
        tuning=tuning,
        notes=_notes(index.backend, k, memory.num_tokens, total, tuning),
    )


def _questions(
    opened: OpenMemory, indexes: dict[str, VectorIndex], sample: dict[int, Tensor], k: int
) -> list[_Question]:
    questions = []
    for slot in slots(opened.manifest):
        keys = slot.keys(opened)
        values = keys if slot.layer is None else slot.values(opened)
        for layer, queries in sample.items() if slot.layer is None else [(slot.layer, sample[slot.layer])]:
            if slot.head is not None:  # the heads of one group search the keys of their key-value head
                groups = opened.manifest.parts[f"keys.{layer}"].shape[0]
                queries = queries.unflatten(1, (groups, -1))[:, slot.head]
            asked = queries.flatten(0, 1)
            truth = quality.exact(keys, values, asked, k)
            questions.append(_Question(layer, slot, indexes[slot.name], keys, values, asked, truth))
    return questions


def _measure(questions: Sequence[_Question], k: int) -> list[LayerQuality]:
    by_layer: dict[int, list[Quality]] = {}
    for each in questions:
        measured = quality.measure(each.index, each.keys, each.values, each.queries, k, each.truth)
        by_layer.setdefault(each.layer, []).append(measured)
    return [LayerQuality(layer=layer, **quality.mean(each).model_dump()) for layer, each in by_layer.items()]


def _tune(questions: Sequence[_Question], k: int, target_mass: float) -> tuple[Tuning, list[LayerQuality]]:
    """Try the tunable options, cheapest first, and leave the indexes with those chosen."""
    tunable = type(questions[0].index).tunable
    ranked = product(*(list(enumerate(values)) for values in tunable.values()))
    trials: list[Trial] = []
    measured: list[list[LayerQuality]] = []
    for choice in sorted(ranked, key=lambda choice: sum(rank for rank, _ in choice)):
        options = dict(zip(tunable, (value for _, value in choice), strict=True))
        _set(questions, options)
        measured.append(_measure(questions, k))
        trials.append(Trial(options=options, total=quality.mean(measured[-1])))
        if reaches(trials[-1].total.kept, target_mass):
            break
    best = max(range(len(trials)), key=lambda i: trials[i].total.kept)  # the cheapest, if several are equal
    _set(questions, trials[best].options)
    options, reached = trials[best].options, reaches(trials[best].total.kept, target_mass)
    return Tuning(target_mass=target_mass, reached=reached, options=options, trials=trials), measured[best]


def _reading_us(questions: Sequence[_Question], indexes: dict[str, VectorIndex], k: int) -> float:
    """CPU time in microseconds that a query takes in reading: to search encoder states, or to rank blocks of keys."""

    def ask(index: VectorIndex, queries: Tensor, slot: Slot) -> Tensor:
        return index.search(queries, k)[1] if slot.layer is None else index.block_maxima(queries, BLOCK)

    total = 0.0
    for each in questions:
        some = each.queries[: quality.TIMED]
        _, cpu = quality.timed(partial(ask, indexes[each.slot.name], some, each.slot), len(some))
        total += cpu * len(each.queries)
    return total / sum(len(each.queries) for each in questions)


def _set(questions: Sequence[_Question], options: dict[str, int]) -> None:
    for question in questions:
        question.index.options = question.index.options.model_copy(update=options)


def _notes(backend: str, k: int, num_tokens: int, total: Quality, tuning: Tuning | None) -> list[str]:
    notes = []
    if k == num_tokens:
        notes.append(f"k={k} takes in every token of the memory: any index that returns them all is exact.")
    if total.exact_mass < LITTLE:
        notes.append(
            f"Even the exact top {k} of {num_tokens} keys hold only {total.exact_mass:.1%} of the attention: k is too "
            "small for this memory, whatever the index."
        )
    if tuning is not None:
        if not tuning.options:
            notes.append(f"The backend {backend!r} has nothing to tune.")
        _, _, options = load_config().index_plugin(backend)
        configured = options.model_dump(mode="json", exclude_unset=True)
        notes += [
            f"{key} = {configured[key]} is configured for this backend, which goes before the {value} that was tuned."
            for key, value in tuning.options.items()
            if configured.get(key, value) != value
        ]
    return notes
