"""Making the index that a memory is searched with."""

from __future__ import annotations

from memstore.config import load as load_config
from memstore.interfaces import VectorIndex


def new_index(backend: str | None = None) -> VectorIndex:
    """An empty index of the named backend, or of the configured one. Raises PluginError or ConfigError."""
    return load_config().index(backend)
