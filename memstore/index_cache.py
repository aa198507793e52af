"""Loading, building and keeping the indexes of one memory.

An index that is worth keeping lies in ``<memory's folder>/indexes/<unique>/``, one file for each slot, and is known by
the record in the catalog that names that folder. The record is committed after the files were written, so an index is
there in whole or not at all; a native library reads a file only if its bytes are those that were written.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from memstore import registry
from memstore.catalog import index_lock
from memstore.errors import (
    DamagedMemoryError,
    IndexNotice,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from memstore.files import FULL
from memstore.index_files import UnusableError, check_file, checksum_of
from memstore.index_record import IndexFile, IndexRecord, is_removed, read_record, removed, used_folders, write_record
from memstore.interfaces import SavedIndex, VectorIndex
from memstore.notices import outside
from memstore.open_memory import OpenMemory
from memstore.slots import slots

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Keys = Mapping[str, "list[Tensor]"]


@dataclass
class MemoryIndex:
    """The indexes of one memory, by the names of its slots. ``record``: what is known of them, if they are kept."""

    backend: str
    indexes: dict[str, VectorIndex]
    record: IndexRecord | None


class IndexCache:
    """Loading, building and keeping the indexes of one memory for one backend."""

    def __init__(
        self, opened: OpenMemory, keys: Keys | None, backend: str, plugin: type[VectorIndex], options: BaseModel
    ) -> None:
        self.manifest, self.store = opened.manifest, opened.memory.store
        self.records = self.store.records
        self.slots = slots(self.manifest)
        self.opened, self.keys = opened, keys or {}
        self.backend, self.plugin, self.options = backend, plugin, options
        self.saved = issubclass(plugin, SavedIndex)
        self.seconds = 0.0

    @property
    def folder(self) -> Path | None:
        folder = self.records.folder(self.manifest.id)
        return None if folder is None else folder / "indexes"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which this process alone changes the indexes of this memory."""
        self.store.check_writable()
        try:
            lock = self.records.lock(index_lock(self.manifest.id), wait=False)
        except StoreBusyError:
            message = f"Waiting for another process that builds an index of memory {self.manifest.name!r}."
            warnings.warn(message, IndexNotice, stacklevel=outside())
            lock = self.records.lock(index_lock(self.manifest.id), wait=True)
        try:
            yield
        finally:
            lock.release(discard=is_removed(self.records, self.manifest))

    def load(self) -> MemoryIndex:
        """The index as it lies in the store. Raises UnusableError."""
        record = read_record(self.records, self.manifest.id, self.backend)
        parent = self.folder
        if record is None or not record.files or parent is None:
            raise UnusableError("none was kept")
        self._check_current(record)
        if record.files.keys() != {slot.name for slot in self.slots}:
            raise UnusableError("the one kept is of another kind of memory")
        try:
            options = self._searched_with(record)
        except ValidationError as error:
            raise UnusableError("the one kept has options that the backend no longer knows") from error
        indexes: dict[str, VectorIndex] = {}
        for slot in self.slots:
            path, index = parent / record.folder / slot.name, self.plugin(options)
            assert isinstance(index, SavedIndex)
            try:
                check_file(path, record.files[slot.name])
                index.load(path)
            except UnusableError:
                raise
            except Exception as error:  # whatever a native library makes of a file that an older version of it wrote
                raise UnusableError(f"{path} cannot be read ({error})") from error
            if index.num_keys != self.manifest.num_tokens:
                raise UnusableError(f"{path} holds {index.num_keys} keys instead of {self.manifest.num_tokens}")
            indexes[slot.name] = index
        logger.info("loaded the index %r of memory %r", self.backend, self.manifest.name)
        return MemoryIndex(self.backend, indexes, record)

    def build(self, record: IndexRecord | None) -> MemoryIndex:
        """Build from the memory's vectors. ``record``: how it was built and tuned before, if that is to be kept up."""
        return MemoryIndex(self.backend, dict(self.built(record)), record)

    def built(self, record: IndexRecord | None) -> Iterator[tuple[str, VectorIndex]]:
        """The same slot by slot, so that what is only to be written need never be in memory all at once."""
        options = self.options if record is None else self._searched_with(record)
        self.seconds = 0.0
        for slot in self.slots:
            begun = time.monotonic()
            index = self.plugin(options)
            keys = None if self.saved else self.keys.get(slot.name)  # what is kept is built from verified vectors
            index.build(keys or slot.keys(self.opened))
            self.seconds += time.monotonic() - begun
            logger.debug("built %s of memory %r by %r", slot.name, self.manifest.name, self.backend)
            yield slot.name, index

    def build_and_keep(self, reason: str) -> MemoryIndex:
        """Build, because of ``reason``, and keep it if that is possible."""
        logger.info("the index %r of memory %r is built, because %s", self.backend, self.manifest.name, reason)
        built, kept = None, "It is not kept, because the store was opened read-only or is not on disk."
        if self.store.mode == "r":
            with suppress(UnusableError):
                return self.load()  # a writer may have replaced it between its record and its files
        if self.store.mode == "a" and self.folder is not None:
            try:
                with self.locked():
                    with suppress(UnusableError):
                        return self.load()  # another process may have been faster
                    built = self.build(self.current_record())
                    built.record = self.keep(built.indexes.items(), built.record)
                    kept = "It is kept for the next time."
            except StoreError as error:
                kept = f"It could not be kept: {error}"
        if built is None:  # not even the lock could be had, or what is wrong with the memory is told again
            built = self.build(self.current_record())
        warnings.warn(
            f"The index {self.backend!r} of memory {self.manifest.name!r} was built in {self.seconds:.1f} s, because "
            f"{reason}. {kept} (`memstore reindex` builds an index ahead.)",
            IndexNotice,
            stacklevel=outside(),
        )
        return built

    def keep(self, indexes: Iterable[tuple[str, VectorIndex]], before: IndexRecord | None) -> IndexRecord:
        """Write the files and make them known; what they replace is deleted. Raises StoreError."""
        parent = self.folder
        if parent is None:
            raise removed(self.manifest)
        name = uuid.uuid4().hex
        folder, files = parent / name, {}
        try:
            if parent.is_symlink() or parent.is_file():  # none of ours
                parent.unlink()
            parent.mkdir(exist_ok=True)  # but not the memory's own folder, if that is gone
            folder.mkdir()
            for slot, index in indexes:
                assert isinstance(index, SavedIndex)
                self._write(index, folder / slot)
                del index  # before the next one is built
                files[slot] = IndexFile(nbytes=(folder / slot).stat().st_size, checksum=checksum_of(folder / slot))
            record = self.record(name, files, before)
            write_record(self.records, self.manifest, record)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            if self.folder is None or is_removed(self.records, self.manifest):  # or it is just going
                raise removed(self.manifest) from error
            if error.errno in FULL:
                message = f"The disk that holds {folder} is full. Free some space and repeat; nothing is lost."
                raise StoreFullError(message) from error
            raise StoreError(f"The index could not be written to {folder}: {error}.") from error
        self._sweep()
        logger.info("kept the index %r of memory %r in %s", self.backend, self.manifest.name, folder)
        return record

    def _write(self, index: SavedIndex, path: Path) -> None:
        try:
            index.save(path)
        except OSError:
            raise
        except Exception as error:  # whatever a native library has to say
            raise StoreError(f"The backend {self.backend!r} could not write {path}: {error}.") from error

    def record(self, folder: str, files: dict[str, IndexFile], before: IndexRecord | None) -> IndexRecord:
        """What is to be known of an index: with these files, and else as ``before``, if that is to be kept up."""
        plugin = registry.info(registry.BACKENDS, self.backend)
        options = {key: value for key, value in self.options.model_dump(mode="json").items() if self._decides(key)}
        return IndexRecord(
            backend=self.backend,
            distribution=plugin.distribution,
            version=plugin.version,
            created=time.time(),
            seconds=self.seconds,
            digest=self.manifest.digest,
            options=options if before is None else before.options,
            tuned={} if before is None else before.tuned,
            quality=None if before is None else before.quality,
            folder=folder,
            files=files,
        )

    def _decides(self, option: str) -> bool:
        """Whether an option decides what is built."""
        return option not in self.plugin.tunable and option not in getattr(self.plugin, "unsaved", ())

    def _searched_with(self, record: IndexRecord) -> BaseModel:
        """What was configured, before what was tuned, before the defaults."""
        configured = self.options.model_dump(mode="json", exclude_unset=True)
        return self.plugin.Options.model_validate({**record.options, **record.tuned, **configured})

    def current_record(self) -> IndexRecord | None:
        """The record of an index without files that can be used, if it would be built again as it was."""
        record = read_record(self.records, self.manifest.id, self.backend)
        try:
            if record is not None:
                self._check_current(record)
                self._searched_with(record)
        except (UnusableError, ValidationError):
            return None
        return record

    def _check_current(self, record: IndexRecord) -> None:
        if record.digest != self.manifest.digest:
            raise UnusableError("the one kept was built from other vectors")
        distribution = registry.info(registry.BACKENDS, self.backend).distribution
        if record.distribution != distribution:  # whose files may mean anything to this one
            raise UnusableError(f"the one kept was built by {record.distribution}, and {distribution} is installed")
        for option, value in self.options.model_dump(mode="json", exclude_unset=True).items():
            if self._decides(option) and record.options.get(option) != value:
                raise UnusableError(
                    f"the one kept was built with {option} = {record.options.get(option)}, and {value} is configured"
                )

    def _sweep(self) -> None:
        """Delete what no index of this memory needs: a replaced one, or what a killed process left."""
        parent = self.folder
        with suppress(OSError, DamagedMemoryError):  # the next one tries again
            needed = used_folders(self.records, self.manifest.id)
            for folder in parent.iterdir() if parent is not None else ():
                if folder.name not in needed:
                    shutil.rmtree(folder, ignore_errors=True)
                    logger.info("dropped %s, which no index of memory %r uses", folder, self.manifest.name)
