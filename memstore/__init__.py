"""A transformer reads a document once; what it read is kept on disk and attached to the same model later."""

from __future__ import annotations

import logging
from os import PathLike
from typing import TYPE_CHECKING, Any

from memstore.errors import MemstoreError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from memstore.attachment import Attachment
    from memstore.interfaces import Mode
    from memstore.memory import Memory
    from memstore.store import MemoryStore

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet, unless the program asks

__version__ = "0.1.0"
__all__ = ["MemstoreError", "__version__", "attach", "open"]


def open(path: str | PathLike[str], mode: Mode = "a", *, records: str | None = None) -> MemoryStore:
    """Open the store in a directory; ``mode="a"`` creates it where there is none, ``mode="r"`` is read-only.

    ``records`` names the record backend; None is the configured one.
    Raises StoreError when the store cannot be opened so, ConfigError or PluginError when the backend cannot be had.
    """
    from memstore import config, store

    return store.open(path, mode, records=records or config.load().records())


def attach(model: PreTrainedModel, *memories: Memory, **options: Any) -> Attachment:
    """Bind memories to a model's attention while the returned context lasts; see :func:`memstore.attaching.attach`."""
    from memstore.attaching import attach

    return attach(model, *memories, **options)
