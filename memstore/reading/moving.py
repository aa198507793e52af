"""Which sequence a cache belongs to, and which of its rows it holds after they were moved.

Beam search moves the rows of a cache, and so may a caller, by three methods of transformers' caches. While memories are
attached, these note on a cache that bears a mark which row went where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor

MARK = "_memstore_mark"
MOVING = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")


class Sequence:
    """Names a sequence. Copies of its cache belong to the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True)
class Mark:
    """What stands on a cache: rows says of each of its rows which one of the sequence it is."""

    sequence: Sequence
    rows: tuple[int, ...]

    @property
    def is_moved(self) -> bool:
        return self.rows != tuple(range(len(self.rows)))


def mark_of(cache: Any) -> Mark | None:
    """The mark of a cache; None if it has none, or if it cannot be told how its rows were moved."""
    mark: Mark | None = getattr(cache, MARK, None)
    return mark


def put_mark(cache: Any, batch: int) -> Sequence:
    """Let a new sequence begin, whose ``batch`` rows this cache holds in order."""
    sequence = Sequence()
    setattr(cache, MARK, Mark(sequence, tuple(range(batch))))
    _watch(type(cache))
    return sequence


_lock = threading.Lock()
_attached = 0
_watched: dict[tuple[type, str], tuple[Any, Any]] = {}  # the method that a class had, and the one that it has instead


def follow_moves() -> Callable[[], None]:
    """Let marked caches note how their rows are moved, until the function that is returned is called."""
    global _attached
    with _lock:
        _attached += 1
    return _unfollow


def _unfollow() -> None:
    global _attached
    with _lock:
        _attached -= 1
        if _attached:
            return
        for (owner, name), (own, noting) in _watched.items():
            if vars(owner).get(name) is noting:
                setattr(owner, name, own)
        _watched.clear()


def _watch(kind: type) -> None:
    with _lock:
        for name in MOVING:
            owner = next((each for each in kind.__mro__ if name in vars(each)), None)
            if owner is not None and (owner, name) not in _watched:
                own = vars(owner)[name]
                _watched[owner, name] = own, _noting(own)
                setattr(owner, name, _watched[owner, name][1])


def _noting(method: Any) -> Any:
    @wraps(method)
    def noting(cache: Any, *args: Any, **kwargs: Any) -> Any:
        mark = vars(cache).pop(MARK, None)  # so that what the method calls in turn is not noted once more
        rows = None if mark is None else _moved(mark.rows, method.__name__, *args, *kwargs.values())
        result = method(cache, *args, **kwargs)
        if rows is not None:
            setattr(cache, MARK, Mark(mark.sequence, rows))
        return result

    return noting


def _moved(rows: tuple[int, ...], name: str, change: Any, *rest: Any) -> tuple[int, ...] | None:
    """The rows after a move; None if it is not one of those that are known."""
    try:
        every = torch.tensor(rows, device="cpu")
        if name == "batch_repeat_interleave":
            moved = every.repeat_interleave(change)
        else:
            moved = every[change.cpu() if isinstance(change, Tensor) else change]
        return None if rest else tuple(moved.tolist())
    except (IndexError, TypeError, ValueError, RuntimeError):
        return None
