"""Choosing a backend for a memory, where the configuration says ``backend = "auto"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from memstore import registry
from memstore.availability import installed
from memstore.config.settings import AUTO
from memstore.index_record import IndexRecord
from memstore.manifest import Manifest

if TYPE_CHECKING:
    from memstore.config import Config


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
    fitting = {record.backend: _time(record) for record in records if _kept(record) >= auto.target_mass}
    if fitting:
        usable = {plugin.name for plugin in installed(registry.BACKENDS) if plugin.available is not False}
        if fastest := min(sorted(fitting.keys() & usable), key=lambda name: fitting[name], default=None):
            return Choice(fastest, f"it is the fastest that was measured to keep {target}")
        lost = f"{', '.join(fitting)} would keep {target}"
        return Choice(auto.small, f"{lost}, but cannot be used here (`memstore plugins` says why)")
    lacking = f"no index of these {manifest.num_tokens:,} tokens was measured to keep {target}"
    return Choice(auto.small, f"{lacking} (`memstore check` with --backend and --tune measures one)")


def _kept(record: IndexRecord) -> float:
    """The share of the exact search's attention mass that this index captures; 0 if that is not known."""
    return 0.0 if record.quality is None else cast(float, record.quality.get("kept", 0.0))


def _time(record: IndexRecord) -> float:
    """Microseconds of CPU time a query."""
    assert record.quality is not None
    return cast(float, record.quality["cpu_us"])
