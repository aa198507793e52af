"""Choosing a backend for a memory, where the configuration says ``backend = "auto"``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from memstore import registry
from memstore.availability import installed
from memstore.config.settings import AUTO
from memstore.index_record import IndexRecord
from memstore.manifest import Manifest

if TYPE_CHECKING:
    from memstore.config import Config

ROUNDING = 1e-6  # of a share of the attention mass that is computed in float32


class Choice(NamedTuple):
    """A backend, and why it is this one."""

    backend: str
    reason: str


def choose(
    config: Config, backend: str | None, manifest: Manifest, records: Sequence[IndexRecord], device: str = "cpu"
) -> Choice:
    """The backend that searches a memory: the one named here, else the configured one, of which "auto" is a choice.

    records: the indexes that are kept of the memory, with what was measured of them. device: where the queries are.
    Nothing is chosen that is not known to keep the configured share of the attention mass.
    """
    auto, name = config.settings.index.auto, config.settings.index.backend if backend is None else backend
    if name != AUTO:
        return Choice(name, "it is configured" if backend is None else "it was asked for")
    if manifest.num_tokens <= auto.exact_tokens:
        return Choice(auto.small, f"{manifest.num_tokens:,} tokens are not more than {auto.exact_tokens:,}")
    if device.partition(":")[0] != "cpu":
        return Choice(auto.small, f"on {device} every key is scored at once")
    target = f"{auto.target_mass:.1%} of the attention mass"
    kept = [record for record in records if reaches(_measured(record, "kept"), auto.target_mass)]
    fitting = {record.backend: _measured(record, "reading_us") for record in kept if _pays(record)}
    if fitting:
        usable = {plugin.name for plugin in installed(registry.BACKENDS) if plugin.available is not False}
        if fastest := min(sorted(fitting.keys() & usable), key=lambda name: fitting[name], default=None):
            return Choice(fastest, f"it is the fastest that was measured to keep {target}")
        lost = f"{', '.join(fitting)} would keep {target}"
        return Choice(auto.small, f"{lost}, but cannot be used here (`memstore plugins` says why)")
    lacking = f"no index of these {manifest.num_tokens:,} tokens was measured to be faster and keep {target}"
    return Choice(auto.small, f"{lacking} (`memstore check` with --backend and --tune measures one)")


def reaches(kept: float, target_mass: float) -> bool:
    """Whether an index that keeps this share reaches the target; an exact one may lose what float32 rounds away."""
    return kept >= target_mass - ROUNDING


def _pays(record: IndexRecord) -> bool:
    """Whether reading takes less CPU time with this index than with the one that it would replace."""
    return _measured(record, "reading_us") < _measured(record, "small_reading_us", math.inf)


def _measured(record: IndexRecord, what: str, unknown: float = 0.0) -> float:
    """What tuning kept of an index: ``kept``, or the microseconds of CPU time that reading takes a query."""
    return cast(float, (record.quality or {}).get(what, unknown))
