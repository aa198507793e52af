"""Memories bound to a model: its hooks, its steps, and which memories are open for its rows."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from memstore.attaching import check_fit
from memstore.errors import AttachError, HookError
from memstore.hooks import AttentionFunction, exactly, install, uncompiled
from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.places import Places
from memstore.provenance import Ledger
from memstore.reading.passes import by_name, device_of
from memstore.rows import Rows, with_fewer, with_more

if TYPE_CHECKING:
    from memstore.interfaces import ModelAdapter

logger = logging.getLogger(__name__)


class Binding(ABC):
    """Memories bound to a model: a context manager. On leaving it, also by an exception, every hook is gone."""

    strict = True  # whether a memory that is added must have the model's fingerprint

    def __init__(self, adapter: ModelAdapter, rows: Sequence[Sequence[Memory]], explain: bool) -> None:
        if not isinstance(explain, bool):
            raise AttachError(f"explain={explain!r} must be True or False.")
        self.adapter, self.model = adapter, adapter.model
        self.rows = [list(row) for row in rows]
        self._opened: dict[int, OpenMemory] = {}
        self._stack = ExitStack()
        self._ledger = Ledger() if explain else None
        self._calls = 0
        self._claim = threading.Lock()
        self._thread: int | None = None  # which is inside a step

    @abstractmethod
    def _readers(self) -> dict[nn.Module, AttentionFunction]:
        """The attention modules to hook, and how each reads."""

    @abstractmethod
    def _stage(self) -> nn.Module:
        """The module whose forward pass is one step."""

    @abstractmethod
    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Prepare a step; returns the keyword arguments to run it with."""

    @abstractmethod
    def _prepare(self) -> None:
        """Build what reading needs and is not there yet, once the memories of all rows are open: on entering, and when
        the rows' memories have changed. Where that fails, all is as it was."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what :meth:`_prepare` built and of everything that views the memories."""

    def _watched(self) -> Callable[[], None]:
        """Watch what else of the model matters, until the function that is returned is called."""
        return lambda: None

    def _after(self, output: Any) -> None:  # noqa: B027  (most need nothing of it)
        """Take note of what a step returned."""

    def __enter__(self) -> Self:
        if self._opened:
            raise AttachError("This attachment is in use already; leave it before entering it again.")
        with ExitStack() as stack:
            stack.enter_context(self.adapter.held())
            stack.callback(self._close_all_but, ())
            stack.callback(self._release)
            self._read_from_now_on(self.rows)
            readers = {module: exactly(read) for module, read in self._readers().items()}
            stack.callback(install(readers))
            self._places, self._device = Places(self.model, readers), device_of(self.model)
            stack.callback(self._watched())
            stage = self._stage()
            stack.callback(stage.register_forward_pre_hook(self._pre_hook, with_kwargs=True).remove)
            stack.callback(stage.register_forward_hook(self._post_hook).remove)
            stack.callback(stage.register_forward_hook(self._free, always_call=True).remove)
            self._thread = None
            self._stack = stack.pop_all()
        self._say_what_is_attached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        logger.info("detached from %s", type(self.model).__name__)

    def _say_what_is_attached(self) -> None:
        every = {id(memory): memory for row in self.rows for memory in row}.values()
        tokens = sum(memory.num_tokens for memory in every)
        logger.info("attached to %s: %d memories, %d tokens", type(self.model).__name__, len(every), tokens)
        logger.debug("rows read %s", [[memory.name for memory in row] for row in self.rows])

    def __reduce__(self) -> str:
        raise AttachError(
            "An attachment, and a model while it has one, cannot be copied or pickled. Leave the attachment first."
        )

    def add(self, *memories: Memory, rows: Collection[int] | None = None) -> None:
        """Attach more memories to these rows, None standing for all, between two steps or generations.

        Only they are opened and searched; what is attached already stays as it is. A decoder-only model reads them for
        new prompts: a sequence that is being written keeps the excerpt that was chosen for it.

        Raises what :func:`memstore.attach` raises for them, and AttachError in the middle of a step; then all is as it
        was.
        """
        with self._between_steps():
            lists = with_more(self.rows, memories, rows)
            check_fit(memories, self.adapter, self.strict)
            self._read_from_now_on(lists)
        self._say_what_is_attached()

    def remove(self, *memories: Memory, rows: Collection[int] | None = None) -> None:
        """Detach memories from these rows, None standing for all that have them, between two steps or generations.

        Raises AttachError for a memory that is not attached there, a row that would have none left, and in the middle
        of a step; then all is as it was.
        """
        with self._between_steps():
            self._read_from_now_on(with_fewer(self.rows, memories, rows))
        self._say_what_is_attached()

    def open_memory(self, memory: Memory) -> OpenMemory:
        """The memory's open records. They live as long as this attachment."""
        return self._opened[id(memory)]

    def _check_entered(self) -> None:
        if not self._opened:
            raise AttachError(
                "Nothing is attached yet, or any more: write `with memstore.attach(…) as attached:` around the use."
            )

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Inside, no step begins. Raises AttachError if one is running, or nothing is attached."""
        self._check_entered()
        with self._claim:
            if self._thread is not None:
                raise AttachError("A step is running: memories are added and removed between steps.")
            yield

    def _read_from_now_on(self, rows: Rows) -> None:
        """Let the rows read these memories: open the new ones, close those that no row reads. If one cannot be read,
        nothing has changed."""
        before = self.rows, tuple(self._opened)
        try:
            with torch.inference_mode(False):  # else no gradient could ever go through what is opened here
                for memory in (memory for row in rows for memory in row):
                    if id(memory) not in self._opened:
                        self._opened[id(memory)] = memory.open()
                        if self._ledger is not None:
                            _ = memory.offsets  # kept from now on: the memory may be removed while it is attached
                self.rows = rows
                self._prepare()
        except BaseException:
            self.rows = before[0]
            self._close_all_but(before[1])
            raise
        self._close_all_but({id(memory) for row in rows for memory in row})

    def _close_all_but(self, kept: Collection[int]) -> None:
        for key in [key for key in self._opened if key not in kept]:
            self._opened.pop(key).close()

    def _check_same(self) -> None:
        """Raises AttachError if the model is no longer what the memories were attached to."""
        name, device = type(self.model).__name__, device_of(self.model)
        if device != self._device:
            raise AttachError(
                f"This {name} was moved from {self._device} to {device} while memories are attached to it. Move it "
                "back, or leave the attachment and attach them again."
            )
        if (exchanged := self._places.exchanged()) is not None:
            raise AttachError(
                f"{exchanged} of this {name} was exchanged while memories are attached to it. Leave the attachment and "
                "attach them again, to the model as it is now."
            )

    @uncompiled
    def _pre_hook(
        self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with self._claim:
            if self._thread not in (None, threading.get_ident()):
                raise AttachError(
                    "Another thread is running this model: with memories attached it serves one at a time. Take turns "
                    "with a lock around generate."
                )
            self._thread = threading.get_ident()
        self._check_same()
        self._calls = 0
        named = by_name(stage, args)
        return args[len(named) :], self._before(args[len(named) :], named | kwargs)

    @uncompiled
    def _post_hook(self, stage: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._calls:
            raise HookError(
                f"{type(self.model).__name__} ran without calling its attached attention, so the memory was not read. "
                "Its attention does not follow transformers' AttentionInterface; it needs an adapter of its own."
            )
        self._after(output)
        if self._ledger is not None and self._is_noted():
            self._ledger.close()

    @uncompiled
    def _free(self, stage: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The step is over, whether it succeeded or not; a pass inside of a step does not end it."""
        if self._thread == threading.get_ident() and not self._nested():
            self._thread = None

    def _nested(self) -> bool:
        """Whether a pass of the model is running that is a part of a step."""
        return False

    def _is_noted(self) -> bool:
        """Whether provenance tells of the pass that is running."""
        return not self._nested()

    def check_batch(self, batch: int) -> None:
        """Raises AttachError for a batch that cannot be shared out among the rows of memories."""
        if batch % len(self.rows):
            raise AttachError(
                f"{len(self.rows)} rows of memories are attached; a batch of {batch} cannot be shared out among them."
            )
