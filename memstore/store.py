"""The store: memories by name."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memstore import catalog, noting, pending, registry, removing
from memstore.catalog import SEALED, is_name, key
from memstore.errors import (
    ConfigError,
    DamagedMemoryError,
    DocumentError,
    FormatError,
    MemoryBusyError,
    MemoryNotFoundError,
    MemstoreError,
    StoreError,
    StoreInUseError,
)
from memstore.files import reason
from memstore.index_record import IndexRecord, all_records
from memstore.interfaces import Mode, RecordReader, RecordStore
from memstore.manifest import Manifest
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter
from memstore.open_memory import named

if TYPE_CHECKING:
    from memstore.checking import CheckReport
    from memstore.updating import Update
    from memstore.verify import VerifyResult

logger = logging.getLogger(__name__)

Where = Mapping[str, Any] | Callable[[dict[str, Any]], bool]


def open(path: str | os.PathLike[str], mode: Mode = "a", *, records: str) -> MemoryStore:
    """Open the store at ``path``: for reading and writing, created if it is missing ("a"), or read-only ("r").

    ``records`` names the backend that keeps its bytes. Raises PluginError for an unknown one, StoreNotFoundError,
    ReadOnlyStoreError, FormatError (another format), DamagedMemoryError (the catalog), or StoreError for a path that
    cannot be that of a store.
    """
    if mode not in ("a", "r"):
        raise ValueError(f'mode is "a" or "r", not {mode!r}.')
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no possible path
        raise StoreError(f"{str(path)!r} cannot be the path of a store: {reason(error)}.") from error
    return MemoryStore(resolved, mode, records)


class MemoryStore:
    """A collection of memories. Get one with :func:`memstore.open`; a context manager."""

    def __init__(self, path: Path, mode: Mode, backend: str) -> None:
        self.path, self.mode, self.backend = path, mode, backend
        self.records: RecordStore = registry.load(registry.BACKENDS, backend, RecordStore)(path, mode)
        try:
            catalog.check_format(self.records)
            if mode == "a":
                removing.reclaim(self.records)
        except BaseException:
            self.records.close()
            raise
        logger.debug("opened the store %s, mode %r", path, mode)

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StoreInUseError:
            if error is None:  # else it would hide what went wrong inside
                raise

    def close(self) -> None:
        """Raises StoreInUseError while a memory of it is open."""
        self.records.close()

    def __repr__(self) -> str:
        return f"<MemoryStore {str(self.path)!r}, mode {self.mode!r}>"

    def __reduce__(self) -> str:
        raise StoreError("A store cannot be copied or pickled. Another process opens it for itself.")

    def memories(self) -> list[Memory]:
        """All memories, sorted by name, as they were at one moment."""
        memories = [Memory(self, value) for _, value in self.records.items(SEALED)]
        return sorted(memories, key=lambda memory: memory.name)

    def names(self) -> list[str]:
        """The names of all memories, sorted."""
        return [memory.name for memory in self.memories()]

    def unfinished(self) -> list[Manifest]:
        """The manifests of the memories that are being encoded or updated, or whose encoding or update was interrupted,
        sorted by name.

        The same call again goes on where it was interrupted. ``del store[name]`` gives an encoding up; an update, whose
        earlier version is there under the same name, is given up by :meth:`update` with the earlier text.
        """
        return pending.manifests(self.records)

    def select(self, pattern: str | None = None, *, where: Where | None = None) -> list[Memory]:
        """The memories whose name fits a pattern and whose metadata is as wanted, sorted by name.

        pattern: as for files, ``*``, ``?`` and ``[…]``, with regard to case; None for any name. where: a mapping, whose
        keys the metadata must have with equal values, or a function of the metadata. Raises ConfigError for anything
        else.
        """
        if pattern is not None and not isinstance(pattern, str):
            raise ConfigError(f"pattern={pattern!r} must be a text such as 'gospel-*', or None for any name.")
        wanted = _predicate(where)
        named = (memory for memory in self.memories() if pattern is None or fnmatchcase(memory.name, pattern))
        return [memory for memory in named if wanted(memory.metadata)]

    def matching(self, name: str) -> list[Memory]:
        """The memory of this name; where there is none, those whose names fit it as a pattern, sorted by name.

        Raises MemoryNotFoundError where nothing fits, DamagedMemoryError, FormatError.
        """
        if name in self:
            return [self[name]]
        if found := self.select(name):
            return found
        raise self._not_found(name, as_pattern=any(wildcard in name for wildcard in "*?["))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.records.items(SEALED))

    def __contains__(self, name: object) -> bool:
        return self._value(name) is not None

    def __getitem__(self, name: str) -> Memory:
        """Raises MemoryNotFoundError, DamagedMemoryError, FormatError."""
        with named(name):
            return Memory(self, Manifest.unpack(self.sealed(name)))

    def get(self, name: str) -> Memory | None:
        """The memory of this name, or None."""
        value = self._value(name)
        with named(name):
            return None if value is None else Memory(self, Manifest.unpack(value))

    def __delitem__(self, name: str) -> None:
        """Remove a memory, with what an interrupted update of it left; or, where there is none, what an interrupted
        encoding left under this name. Who has it open keeps reading.

        Raises MemoryNotFoundError, MemoryBusyError (another process is encoding it).
        """
        self.check_writable()
        if not is_name(name):
            raise self._not_found(name)
        try:
            if pending.remove_complete(self.records, name, lambda _: True):
                return
        except (DamagedMemoryError, FormatError):
            removing.remove_unreadable(self.records, key(SEALED, name))
            with contextlib.suppress(MemoryBusyError):
                pending.drop(self.records, name)
            logger.warning("removed the damaged record of memory %r from %s", name, self.path)
            return
        if not pending.drop(self.records, name):
            raise self._not_found(name)

    def set_metadata(self, name: str, metadata: Mapping[str, Any]) -> Memory:
        """Note other metadata of a memory. What it holds stays as it is, and whoever has it open keeps it open.

        Raises DocumentError for metadata that cannot be kept, MemoryNotFoundError, ReadOnlyStoreError.
        """
        self.check_writable()
        if not isinstance(metadata, Mapping):
            raise DocumentError(f"metadata={metadata!r} must be a mapping, such as {{'author': 'unknown'}}.")
        return Memory(self, noting.note(self, name, lambda _: metadata))

    def encode(
        self,
        model: Any,
        tokenizer: Any = None,
        text: str | None = None,
        *,
        name: str,
        input_ids: Any = None,
        input_features: Any = None,
        metadata: Mapping[str, Any] | None = None,
        window: int | None = None,
        overlap: int | None = None,
        dtype: Any = None,
        batch_size: int | None = None,
        anchors: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Memory:
        """Let ``model`` read a document and keep what it read under ``name``: see :func:`memstore.encode.encode`."""
        from memstore.encode import encode

        memory: Memory = encode(
            self,
            model,
            tokenizer,
            text,
            name=name,
            input_ids=input_ids,
            input_features=input_features,
            metadata=metadata,
            window=window,
            overlap=overlap,
            dtype=dtype,
            batch_size=batch_size,
            anchors=anchors,
            progress=progress,
        )
        return memory

    def update(self, model: Any, tokenizer: Any, text: str, *, name: str, **options: Any) -> Update:
        """Keep what ``model`` reads of a text in the place of what it read of an earlier version, and read only what
        changed: see :func:`memstore.updating.update`."""
        from memstore.updating import update

        return update(self, model, tokenizer, text, name=name, **options)

    def reindex(
        self, name: str, backend: str | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, IndexRecord | None]:
        """Build an index of a memory without encoding anything: see :func:`memstore.indexes.reindex`."""
        from memstore.indexes import reindex

        self.check_writable()
        return reindex(self[name], backend, options)

    def indexes(self, name: str) -> list[IndexRecord]:
        """The indexes that are kept of a memory, by backend. Raises MemoryNotFoundError."""
        return all_records(self.records, self[name].manifest.id)

    def check(
        self,
        name: str,
        model: Any,
        *,
        backend: str | None = None,
        k: int | None = None,
        tune: bool = False,
        target_mass: float | None = None,
    ) -> CheckReport:
        """Hold an index of a memory against exact search, by what ``model`` asks of the memory, or tune it: see
        :func:`memstore.checking.check`."""
        from memstore.checking import check

        return check(self, name, model, backend=backend, k=k, tune=tune, target_mass=target_mass)

    def verify(
        self, name: str | None = None, *, repair: bool = False, model: Any = None, tokenizer: Any = None
    ) -> list[VerifyResult]:
        """Check every record of one memory, of those whose names fit a pattern, or of all: in another process, which
        damage may crash, if one can see them.

        ``repair``: rebuild damaged indexes, and damaged memories whose text is whole, with the model that wrote them,
        and its tokenizer. What is there is given up only once what replaces it is whole. A catalog that cannot be read
        is mended before the store is opened: :func:`memstore.repair.mend_catalog`, or `memstore verify --repair`.

        Raises MemoryNotFoundError, ReadOnlyStoreError.
        """
        if repair:
            from memstore.repair import repair as rebuild

            return rebuild(self, name, model, tokenizer)
        from memstore.verify import verify

        return verify(self, name)

    def export(self, folder: str | os.PathLike[str], *names: str) -> list[Path]:
        """Write memories, by default all, as safetensors and JSON into folders of their own in ``folder``, which are
        returned: see :func:`memstore.exporting.export_memory`. Indexes are not exported: they can be built again."""
        from memstore.exporting import export_memory

        memories = [self[name] for name in names] if names else self.memories()
        return [export_memory(memory, Path(folder)) for memory in memories]

    def import_from(self, folder: str | os.PathLike[str]) -> list[Memory]:
        """Bring in all memories that were exported to ``folder``: see :func:`memstore.importing.import_memory`."""
        from memstore.importing import exported, import_memory

        return [import_memory(self, each) for each in exported(Path(folder))]

    def create(self, manifest: Manifest, document: Document, replacing: Manifest | None = None) -> MemoryWriter:
        """Start a memory, or resume the one that an interrupted call with an equal manifest left.

        ``manifest`` is a draft with a new ``id`` and neither ``seal`` nor ``digest``; that of the writer returned may
        have an earlier ``id`` and ``created``. What is left of another manifest of this name is dropped.
        ``replacing``: the complete memory of this name, which the new one replaces once it is complete. Raises
        MemoryExistsError, MemoryBusyError, DocumentError, StoreFullError, ReadOnlyStoreError.
        """
        self.check_writable()
        return pending.start(self, manifest, document, replacing)

    def reader(self, manifest: Manifest) -> RecordReader:
        """The sealed records of a memory. Raises DamagedMemoryError, MemoryNotFoundError."""
        if manifest.seal is None:
            raise StoreError(f"Memory {manifest.name!r} is not complete.")
        try:
            with named(manifest.name):
                return self.records.reader(manifest.id, manifest.seal)
        except DamagedMemoryError:
            current = self.records.get(key(SEALED, manifest.name))
            if current is None:
                raise MemoryNotFoundError(f"Memory {manifest.name!r} has been removed from {self.path}.") from None
            if Manifest.unpack(current).id != manifest.id:
                raise MemoryNotFoundError(
                    f"Memory {manifest.name!r} is no longer the one in {self.path}: another version has taken its "
                    "place since it was looked up. Look it up again."
                ) from None
            raise

    def sealed(self, name: object) -> bytes:
        """The manifest of a memory as it lies in the catalog. Raises MemoryNotFoundError, DamagedMemoryError."""
        value = self._value(name)
        if value is None:
            raise self._not_found(name)
        return value

    def _value(self, name: object) -> bytes | None:
        if not is_name(name):
            return None
        with named(name):
            return self.records.get(key(SEALED, name))

    def _not_found(self, name: object, as_pattern: bool = False) -> MemoryNotFoundError:
        begun: list[str] = []
        close: list[str] = []
        try:
            unfinished = [manifest.name for manifest in self.unfinished()]
            begun = [each for each in unfinished if each == name or (as_pattern and fnmatchcase(each, str(name)))]
            close = difflib.get_close_matches(str(name), self.names(), n=1)
        except MemstoreError:  # another record is damaged, which is not what was asked
            pass
        fitting = ", and none whose name fits it as a pattern" if as_pattern else ""
        hint = told_unfinished(begun) if begun else f"Did you mean {close[0]!r}?" if close else ""
        kind = "complete memory" if begun else "memory"
        return MemoryNotFoundError(f"The store {self.path} holds no {kind} named {name!r}{fitting}. {hint}".rstrip())

    def check_writable(self) -> None:
        """Raises ReadOnlyStoreError for a store that was opened with ``mode="r"``."""
        self.records.check_writable()


def told_unfinished(names: Collection[str], complete: Container[str] = ()) -> str:
    """What there is to know of what is unfinished, of which these are ``complete`` in an earlier version."""
    begun = [name for name in names if name not in complete]
    updates = [name for name in names if name in complete]
    told = []
    if begun:
        told.append(
            f"Unfinished: {', '.join(begun)}. The command that began one goes on with it where it was interrupted; "
            "`memstore remove` gives it up."
        )
    if updates:
        told.append(
            f"Unfinished updates: {', '.join(updates)}. The earlier version is there until an update is complete. The "
            "command that began it goes on with it; `memstore index` of the text as it was gives it up."
        )
    return " ".join(told)


def _predicate(where: Where | None) -> Callable[[dict[str, Any]], bool]:
    if where is None:
        return lambda metadata: True
    if isinstance(where, Mapping):
        if wrong := [key for key in where if not isinstance(key, str)]:
            raise ConfigError(f"where={where!r}: metadata has names for keys, and {wrong[0]!r} is none.")
        facts = dict(where)
        return lambda metadata: all(key in metadata and metadata[key] == value for key, value in facts.items())
    if callable(where):
        return where
    raise ConfigError(f"where={where!r} must be a mapping such as {{'author': 'unknown'}}, or a function of metadata.")
