"""What a plugin implements: an index backend, a record backend, or an adapter for a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict

from memstore.errors import CheckError, DocumentError, ReadOnlyStoreError
from memstore.manifest import PartSpec, WindowRule

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from memstore.attachment import Attachment
    from memstore.memory import Memory
    from memstore.open_memory import OpenMemory

Buffer = bytes | bytearray | memoryview
Mode = Literal["a", "r"]

BLOCK_SEARCH = 1024  # keys that an index which does not score every key is asked for to rank blocks


class Options(BaseModel):
    """The options a plugin accepts. Unknown keys are an error, so that a typing mistake never passes in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class VectorIndex(ABC):
    """Maximum-inner-product search over keys [n, d], of which each has an id 0 … n-1.

    A memory of encoder states has one index, one of keys and values has one for every layer and key-value head. Higher
    scores are better and come first. Where fewer than ``k`` keys are found, the empty slots hold id -1 and score -inf.
    """

    Options: ClassVar[type[BaseModel]] = Options
    tunable: ClassVar[Mapping[str, Sequence[int]]] = {}
    """Options that change a search and nothing that is built, each with values worth trying, cheapest first."""

    num_keys: int  # n and d, set by build
    width: int

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = options if options is not None else type(self).Options()

    @abstractmethod
    def build(self, blocks: Sequence[torch.Tensor]) -> None:
        """Index the keys: blocks of shape [n_i, d], one dtype, in the order of their ids.

        A block may be a view of the store's mapped file: an index that keeps it must not write to it, and lives no
        longer than the open memory. Raises :class:`memstore.errors.IndexBuildError` for keys or options that do not
        fit; :func:`memstore.vectors.checked_keys` finds what is wrong with keys.
        """

    @abstractmethod
    def search(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Best ``k`` keys of every query by inner product.

        queries: [m, d], float32, float16 or bfloat16. Returns scores [m, k] float32 and ids [m, k] int64, on the device
        of the queries. Raises :class:`memstore.errors.QueryError` for a wrong ``k``, dimension or dtype, or values not
        finite; :func:`memstore.vectors.checked_queries` finds what is wrong.
        """

    def search_and_sum(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What :meth:`search` gives, and the log of the sum of exp(score) over all keys: [m] float32, or None.

        An index that scores every key should give the sum, of scores as it would return them: with it provenance says
        exactly how much of the attention the keys hold that were found, and within bounds without.
        """
        return *self.search(queries, k), None

    def block_maxima(self, queries: torch.Tensor, size: int) -> torch.Tensor:
        """The best score in each block of ``size`` successive ids: [m, ceil(n / size)] float32.

        -inf for a block of which nothing is found among the best ``BLOCK_SEARCH`` keys; an index that scores every key
        anyway should answer for every block.
        """
        import torch

        scores, ids = self.search(queries, min(BLOCK_SEARCH, self.num_keys))
        best = scores.new_full((len(queries), -(-self.num_keys // size)), -torch.inf)
        return best.scatter_reduce(1, ids.clamp_min(0) // size, scores, "amax")


class SavedIndex(VectorIndex):
    """An index that costs enough to build to be kept in a file of the store, from which it is loaded later."""

    unsaved: ClassVar[frozenset[str]] = frozenset()
    """Options beside the tunable ones that change nothing in the file, such as the device."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write all that :meth:`load` needs to one new file. Let OSError pass, which the store explains."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Become the index that was saved, built with equal options but for the tunable ones. The store has checked
        that the file holds the bytes that were saved. Sets ``num_keys`` and ``width``."""


class RecordReader(ABC):
    """The sealed records of one memory, open for reading. Buffers it returns stay valid as long as they are held."""

    @abstractmethod
    def get(self, key: bytes) -> memoryview:
        """The value of ``key``, read-only and 16-byte aligned; a large one is not copied. Raises DamagedMemoryError if
        it is missing."""

    @abstractmethod
    def keys(self) -> Iterator[bytes]:
        """All keys in byte order."""

    @abstractmethod
    def close(self) -> None: ...


class RecordWriter(ABC):
    """The records of one memory while it is being written. Only its one writer sees them."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """A copy of a committed value, for resuming."""

    @abstractmethod
    def keys(self) -> Iterator[bytes]:
        """All committed keys in byte order."""

    @abstractmethod
    def put(self, records: Mapping[bytes, Buffer]) -> None:
        """Commit these records together, durably. Raises StoreFullError when the disk is full."""

    @abstractmethod
    def seal(self) -> dict[str, Any]:
        """End writing and close. Returns what a reader needs to notice damage (msgpack-able), kept by the catalog.

        Its ``"nbytes"`` is the space that the records take.
        """

    @abstractmethod
    def close(self) -> None: ...


class Lock(ABC):
    """A lock that is held; a context manager, which releases it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @abstractmethod
    def release(self, discard: bool = False) -> None:
        """Let the next one in; a second call does nothing. ``discard``: nobody will ask for this name again, so nothing
        of it need remain."""


class RecordStore(ABC):
    """Where a store keeps its bytes: one small catalog, and one write-once set of records per memory.

    A process may open one path several times, and sees in each what it changed through another. In mode "r",
    StoreNotFoundError is raised where there is no store, and ReadOnlyStoreError by what would change one. A store that
    has been closed raises StoreError.
    """

    Options: ClassVar[type[BaseModel]] = Options
    persistent: ClassVar[bool] = True
    """Whether what was written is there in a later process."""

    def __init__(self, path: Path, mode: Mode, options: BaseModel | None = None) -> None:
        self.path, self.mode = path, mode
        self.options = options if options is not None else type(self).Options()

    def check_writable(self) -> None:
        """Raises ReadOnlyStoreError for a store that was opened with ``mode="r"``."""
        if self.mode == "r":
            raise ReadOnlyStoreError(f'The store {self.path} was opened with mode="r". Open it with mode="a".')

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """A catalog value, copied."""

    @abstractmethod
    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Catalog records whose key starts with ``prefix``, in byte order, from one snapshot."""

    @abstractmethod
    def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Iterable[bytes] = (),
        expect: Mapping[bytes, bytes | None] | None = None,
    ) -> bool:
        """Change the catalog in one durable step; False and no change if a key of ``expect`` has another value."""

    @abstractmethod
    def writer(self, memory_id: str, capacity: int) -> RecordWriter:
        """Create or reopen the unsealed records of a memory. ``capacity``: bytes its values may reach."""

    @abstractmethod
    def reader(self, memory_id: str, seal: Mapping[str, Any]) -> RecordReader:
        """Open sealed records. Raises DamagedMemoryError if their length or structure is not as sealed."""

    @abstractmethod
    def delete(self, memory_id: str) -> None:
        """Give the space of a memory back, if it has any. A reader that has its records open keeps reading."""

    @abstractmethod
    def folder(self, memory_id: str) -> Path | None:
        """The folder for files that are kept beside the records of a sealed memory and go with them; None if this
        record store keeps nothing on disk, or nothing of this memory."""

    def copy(self, memory_id: str, records: Mapping[bytes, bytes]) -> None:  # noqa: B027  (not all lose their catalog)
        """Keep the catalog record of a memory, and what is committed with it, beside its records too, in place of an
        earlier copy: :meth:`mend` restores them from there, but for copies beside memories that a tombstone names. A
        copy goes before its record does: what is removed must not come back."""

    def drop_copy(self, memory_id: str) -> None:  # noqa: B027
        """Remove the copy beside the records of a memory, if there is one."""

    def copied(self, key: bytes) -> list[str]:
        """The memories beside which a copy of this catalog record lies."""
        return []

    def salvage(self, memory_id: str, key: bytes) -> bytes | None:
        """A value of a damaged memory, where it can still be found; the caller holds it against its checksum."""
        return None

    @classmethod
    def mend(cls, path: Path) -> list[str]:
        """Make the catalog of the store at ``path`` whole again, of what can be read of it and of copies, and say what
        was done; nothing where it is whole. What was there is kept. Raises StoreBusyError while the store is in use."""
        return []

    @abstractmethod
    def lock(self, name: str, wait: bool) -> Lock:
        """Acquire the lock ``name`` ([0-9a-z-]+) among all processes that use this store. It is released with its
        process, in whatever way that ends.

        Raises StoreBusyError if another holds it and ``wait`` is false.
        """

    def lock_names(self) -> list[str]:
        """Locks of which something remains that ``release(discard=True)`` removes, held or not."""
        return []

    @abstractmethod
    def memory_ids(self) -> list[str]:
        """Ids that occupy space, sealed or not."""

    @abstractmethod
    def close(self) -> None:
        """A second call does nothing. Raises StoreInUseError while a reader or writer is open."""


class ModelAdapter(ABC):
    """Knows a model family: how to encode with it, and how its attention reads what was encoded.

    Most families derive from :class:`memstore.families.EncoderDecoderAdapter` or ``DecoderOnlyAdapter`` and only say
    where their attention modules stand.
    """

    model_types: ClassVar[tuple[str, ...]]
    """The ``config.model_type`` of every model it knows; empty for an adapter that serves those which none knows."""
    kind: ClassVar[str]
    refused: ClassVar[Mapping[str, str]] = {}
    """Related model types that cannot be served, each with what in that family prevents it. An adapter that claims one
    of them all the same is used."""

    whole_only: ClassVar[str | None] = None
    """What prevents that a document is read in several windows, or beside another one; None where nothing does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @classmethod
    def serves_unknown(cls, model: PreTrainedModel) -> bool:
        """Whether to try an adapter without model types on a model that none knows. It must prove itself when it is
        made, or raise UnsupportedModelError: nobody else does."""
        return False

    @property
    @abstractmethod
    def native_window(self) -> int:
        """Tokens the model was made to read at once."""

    @abstractmethod
    def rule(self, window: int | None, overlap: int | None) -> WindowRule:
        """How a document is cut; None stands for this family's default. Raises ConfigError for what cannot be."""

    @abstractmethod
    def parts(self, dtype: str) -> dict[str, PartSpec]:
        """The arrays kept for every token, stored as ``dtype``, one of :func:`memstore.manifest.storable` (kind), and
        summaries of several tokens."""

    @abstractmethod
    def encode(self, windows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Read windows [b, w, …] of equal length (token ids [b, w] or features). Returns parts [b, tokens, *shape]."""

    def summaries(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parts whose rows stand for several tokens, made of a block of all others, [n, *shape] each."""
        return {}

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors that decide what :meth:`encode` returns, for the fingerprint."""

    @abstractmethod
    def attachment(self, rows: Sequence[Sequence[Memory]], **options: Any) -> Attachment:
        """Bind memories, one list for each batch row, or a single list for all rows."""

    def queries(self, opened: OpenMemory) -> dict[int, torch.Tensor]:
        """A bounded sample of what the decoder asks of this memory, the same every time: {layer: [m, num_heads, d]}.

        float32 on the CPU, with the width and in the space of the keys that an index holds, and multiplied by the
        attention's scaling, so that inner products with the keys are the scores of the softmax.

        Raises CheckError if the model cannot give one, AttachError while a memory is attached to it.
        """
        raise CheckError(
            f"{type(self).__name__} gives no sample of what {type(self.model).__name__} asks, by which to judge an "
            "index. An adapter that derives from EncoderDecoderAdapter or DecoderOnlyAdapter gives one."
        )

    def held(self) -> AbstractContextManager[None]:
        """While memories are attached: inside, the model reads as it read what they hold, and then again as before."""
        return nullcontext()

    def prefix(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens to read before every window of a long document; none unless the family needs them."""
        return []

    def closing(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens that a prompt ends with and that ask nothing of a memory; none unless the family has such."""
        return []

    @property
    def vocab_size(self) -> int:
        """Token ids that the model reads are below this; 0 if it does not read token ids."""
        return len(cast("torch.Tensor", self.model.get_input_embeddings().weight))

    def rope(self) -> torch.Tensor | None:
        """The rotary frequencies that memories are read with, for the fingerprint; None without rotary positions."""
        return None

    def feature_windows(self, features: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Cut ``input_features`` into windows [b, …] and say how many tokens each gives. Raises DocumentError."""
        raise DocumentError(f"{type(self.model).__name__} reads token ids, not input_features.")
