"""What was read, in words: readings of each token, and totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from memstore.errors import AttachError
from memstore.provenance.ledger import Ledger, Record
from memstore.provenance.passages import PASSAGE

if TYPE_CHECKING:
    from memstore.memory import Memory

Fold = Literal["mean", "max", "each"]
FOLDS: tuple[Fold, ...] = ("mean", "max", "each")


class Reading(NamedTuple):
    """One passage that held attention while one token was made; characters are None for a memory without text.

    step: how many tokens of the answer stand before that token; for an encoder-decoder, how many the decoder had read
    before the one at which it was made. layer, head: None where all were taken together. mass: the share of all
    attention, that to the prompt included, 0 to 1. token: the token that was made; None where it is not known.
    """

    step: int
    row: int
    layer: int | None
    head: int | None
    document: str
    start_token: int
    end_token: int
    start_char: int | None
    end_char: int | None
    mass: float
    token: int | None


class Retrieved(NamedTuple):
    """The share of the attention over all of its memories that the keys which were read hold: low = high where it is
    known, else bounds. It is low where nothing in the memories answers more than the rest."""

    step: int
    row: int
    layer: int | None
    head: int | None
    low: float
    high: float


class Passage(NamedTuple):
    """A passage and its share of all attention: the mean over tokens, rows, layers and heads, 0 to 1."""

    document: str
    start_token: int
    end_token: int
    start_char: int | None
    end_char: int | None
    share: float


class DocumentShare(NamedTuple):
    """A document and its share of all attention: the mean over tokens, rows, layers and heads, 0 to 1."""

    document: str
    share: float


class Moment(NamedTuple):
    """One row at one step: which row ``i`` of which record, and what token it made."""

    step: int
    row: int
    record: Record
    i: int
    token: int | None


class Provenance(Sequence[Reading]):
    """What was read for every token: a sequence of readings, by step, row, layer and head, the heaviest first.

    heads and layers: "mean" or "max" over all, heads first, or "each". A token's readings are those of the passages
    that are among its 32 heaviest by their mean over layers and heads, or by their maximum; the totals are of all.
    """

    def __init__(self, ledger: Ledger, heads: Fold, layers: Fold, beam_indices: Tensor | None) -> None:
        for name, value in (("heads", heads), ("layers", layers)):
            if value not in FOLDS:
                raise AttachError(f'{name}={value!r} must be "mean", "max" or "each".')
        self.heads, self.layers = heads, layers
        beams = ledger.beam_indices if beam_indices is None else beam_indices
        if beams is not None:
            _check_beams(ledger, beams)
        self._moments = list(_moments(ledger, beams))

    @overload
    def __getitem__(self, place: int) -> Reading: ...
    @overload
    def __getitem__(self, place: slice) -> list[Reading]: ...
    def __getitem__(self, place: int | slice) -> Reading | list[Reading]:
        return self._readings[place]

    def __len__(self) -> int:
        return len(self._readings)

    def documents(self) -> list[DocumentShare]:
        """Every document's share of all attention, the largest first."""
        totals: dict[Memory, float] = defaultdict(float)
        means = _per_record(self._moments, lambda record: record.documents.mean((0, 2)))
        for moment, shares in means:
            for memory, share in zip(moment.record.layout.memories, shares, strict=True):
                totals[memory] += share
        shares = [DocumentShare(memory.name, total / len(self._moments)) for memory, total in totals.items()]
        return sorted(shares, key=lambda each: -each.share)

    def passages(self, most: int | None = None) -> list[Passage]:
        """Every passage that held attention, or the ``most`` heaviest ones, the heaviest first.

        Raises AttachError for another ``most`` than a whole number of at least 1, or None.
        """
        if most is not None and (type(most) is not int or most < 1):
            raise AttachError(f"most={most!r} must be a whole number of at least 1, or None for all passages.")
        sums: dict[Any, Tensor] = {}
        for moment in self._moments:
            layout, masses = moment.record.layout, moment.record.passages[moment.i]
            sums[layout] = sums[layout] + masses if layout in sums else masses
        totals: dict[tuple[Memory, int], float] = defaultdict(float)
        for layout, masses in sums.items():
            for place in masses.nonzero().flatten().tolist() if len(sums) > 1 or most is None else _top(masses, most):
                totals[layout.locate(place)] += float(masses[place])
        ranked = sorted(totals.items(), key=lambda item: -item[1])[:most]
        return [Passage(memory.name, *_span(memory, n), total / len(self._moments)) for (memory, n), total in ranked]

    def retrieved(self) -> list[Retrieved]:
        """How much of the attention over all memories the keys hold that were read, by step, row, layer and head.

        1 where everything was read. Known, up to the rounding of an index's scores, where every key was scored, as
        ``exact`` does; else within bounds. Raises AttachError for a decoder-only model that chose spans, which scores
        nothing else while it reads.
        """
        if any(moment.record.low is None for moment in self._moments):
            raise AttachError(
                "A decoder-only model reads the spans chosen for its prompt, and scores nothing else while it does. "
                "What share of all its attention a memory held is told by documents(); whether the memories speak of "
                "what was asked, by attached.coverage(question, tokenizer=…)."
            )
        found = []
        bounds = [
            _per_record(self._moments, lambda record, name=name: self._folded(getattr(record, name)).transpose(0, 1))
            for name in ("low", "high")
        ]
        for (moment, lows), (_, highs) in zip(*bounds, strict=True):
            for layer, of_layer in zip(self._layers(moment.record), zip(lows, highs, strict=True), strict=True):
                for head, (low, high) in enumerate(zip(*of_layer, strict=True)):
                    found.append(Retrieved(moment.step, moment.row, layer, self._head(head), low, high))
        return found

    @cached_property
    def _readings(self) -> list[Reading]:
        readings = []
        spans: dict[tuple[Memory, int], tuple[int, int, int | None, int | None]] = {}
        masses = _per_record(self._moments, lambda record: self._folded(record.masses).transpose(0, 1))
        places = _per_record(self._moments, lambda record: record.places)
        for (moment, by_layer), (_, of_row) in zip(masses, places, strict=True):
            located = [moment.record.layout.locate(place) if place >= 0 else None for place in of_row]
            for layer, by_head in zip(self._layers(moment.record), by_layer, strict=True):
                for head, values in enumerate(by_head):
                    pairs = [(mass, where) for mass, where in zip(values, located, strict=True) if where and mass > 0]
                    for mass, where in sorted(pairs, key=lambda pair: -pair[0]):
                        if where not in spans:
                            spans[where] = _span(*where)
                        what = (layer, self._head(head), where[0].name, *spans[where], mass, moment.token)
                        readings.append(Reading(moment.step, moment.row, *what))
        return readings

    def _folded(self, values: Tensor) -> Tensor:
        """Values [L, b, H, …] with heads, then layers, taken together as asked; the dimensions stay, at size 1."""
        for dim, fold in ((2, self.heads), (0, self.layers)):
            if fold != "each":
                values = values.mean(dim, keepdim=True) if fold == "mean" else values.amax(dim, keepdim=True)
        return values

    def _layers(self, record: Record) -> Sequence[int | None]:
        return record.layers if self.layers == "each" else [None]

    def _head(self, head: int) -> int | None:
        return head if self.heads == "each" else None


def _per_record(moments: Sequence[Moment], of: Any) -> Iterator[tuple[Moment, Any]]:
    """Each moment with its own row, as lists, of what ``of`` makes of its record: [b, …]. Worked out once a record."""
    made: dict[int, Any] = {}
    for moment in moments:
        key = id(moment.record)
        if key not in made:
            made[key] = of(moment.record).tolist()
        yield moment, made[key][moment.i]


def _check_beams(ledger: Ledger, beam_indices: Tensor) -> None:
    """Raises AttachError for beam indices that cannot be those of what was generated last."""
    known = {row for records in ledger.records.values() for record in records for row in record.rows}
    wanted = "beam_indices of the last generation, as model.generate(…, return_dict_in_generate=True) returns them"
    if (
        not isinstance(beam_indices, Tensor)
        or beam_indices.dim() != 2
        or not len(beam_indices)
        or beam_indices.dtype not in (torch.int64, torch.int32)
    ):
        raise AttachError(f"Give the {wanted}: whole numbers [rows, new tokens].")
    if strange := set(beam_indices.flatten().tolist()) - known - {-1}:
        raise AttachError(f"Row {min(strange)} was not generated. Give the {wanted}.")
    passes, columns = max(ledger.records, default=ledger.first) - ledger.first + 1, beam_indices.shape[1]
    if columns > passes:
        raise AttachError(
            f"These beam_indices are of {columns} new tokens, and the passes that are known made {passes}. Give the "
            f"{wanted}. Without a cache each pass reads everything anew, and only the last one is known: then beams "
            "cannot be followed; leave out use_cache=False."
        )


def _moments(ledger: Ledger, beam_indices: Tensor | None) -> Iterator[Moment]:
    """All rows at all steps, in order; with beam indices [rows, new tokens], the rows of the sequences returned."""
    beams = None if beam_indices is None else beam_indices.tolist()
    sequences = None if ledger.sequences is None else ledger.sequences.tolist()
    for position, records in ledger.records.items():
        step = position - ledger.start
        owners = {row: (record, i) for record in records for i, row in enumerate(record.rows)}
        if beams is None:
            rows = [(row, row) for row in sorted(owners)]
        else:
            column = max(0, position - ledger.first)
            rows = [(i, row[column]) for i, row in enumerate(beams) if column < len(row) and row[column] >= 0]
        for row, source in rows:
            token = None
            if sequences is not None:
                if row >= len(sequences) or ledger.prompt + step >= len(sequences[row]):
                    continue  # a candidate that was read for, and never came to be
                token = sequences[row][ledger.prompt + step]
            yield Moment(step, row, *owners[source], token)


def _span(memory: Memory, passage: int) -> tuple[int, int, int | None, int | None]:
    """First token and end, first character and end of a passage."""
    start, end = passage * PASSAGE, min((passage + 1) * PASSAGE, memory.num_tokens)
    return start, end, *((None, None) if memory.offsets is None else memory.chars(start, end))


def _top(masses: Tensor, most: int) -> list[int]:
    best = masses.topk(min(most, len(masses)))
    return [place for place, mass in zip(best.indices.tolist(), best.values.tolist(), strict=True) if mass > 0]
