"""Which memories each row of a batch reads, and how that may change."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memstore.errors import AttachError
from memstore.memory import Memory

Rows = list[list[Memory]]
WANTED = "Give memories as a store gives them, store['name'], one after another (of a list: *memories)"


def unified(rows: Sequence[Sequence[Memory]]) -> Rows:
    """The same lists, in which one object stands for a memory, however often it was looked up.

    Raises AttachError for what are no lists of memories, and for a row that reads nothing, or one memory twice.
    """
    if not isinstance(rows, Sequence) or not all(map(_are_memories, rows)):
        raise AttachError(f"{WANTED}, and rows= as one list of them a row.")
    same: dict[tuple[object, str], Memory] = {}
    lists = [[same.setdefault(_key(memory), memory) for memory in row] for row in rows]
    if not lists or not all(lists):
        raise AttachError("Every batch row needs at least one memory.")
    for row in lists:
        if len(set(map(_key, row))) < len(row):
            raise AttachError(f"A memory is attached twice to one row: {', '.join(memory.name for memory in row)}.")
    return lists


def with_more(rows: Rows, memories: Sequence[Memory], chosen: Collection[int] | None) -> Rows:
    """The lists after these memories were added to the chosen rows, None standing for all.

    Raises AttachError for no memory, for a row that there is not, and for one that reads such a memory already.
    """
    wanted = _checked(rows, memories, chosen)
    return unified([[*row, *memories] if i in wanted else row for i, row in enumerate(rows)])


def with_fewer(rows: Rows, memories: Sequence[Memory], chosen: Collection[int] | None) -> Rows:
    """The lists without these memories in the chosen rows, None standing for all that have them.

    Raises AttachError for no memory, for a row that there is not or that would read nothing, and for a memory that is
    not read there.
    """
    wanted, gone = _checked(rows, memories, chosen), {_key(memory) for memory in memories}
    for memory in memories:
        reading = {i for i, row in enumerate(rows) if _key(memory) in map(_key, row)}
        if not reading or (chosen is not None and not wanted <= reading):
            where = "any row" if chosen is None else f"row {min(wanted - reading)}"
            raise AttachError(f"Memory {memory.name!r} is not attached to {where}.")
    lists = [[m for m in row if i not in wanted or _key(m) not in gone] for i, row in enumerate(rows)]
    for i, row in enumerate(lists):
        if not row:
            raise AttachError(f"Row {i} would have no memory left. Add another one first, or leave the attachment.")
    return lists


def _key(memory: Memory) -> tuple[object, str]:
    return memory.store.path, memory.manifest.id


def _are_memories(row: object) -> bool:
    return isinstance(row, Sequence) and all(isinstance(memory, Memory) for memory in row)


def _checked(rows: Rows, memories: Sequence[Memory], chosen: Collection[int] | None) -> set[int]:
    """The rows that are meant."""
    if not memories or not _are_memories(memories):
        raise AttachError(f"{WANTED}; at least one.")
    if chosen is None:
        return set(range(len(rows)))
    known = isinstance(chosen, Collection) and all(type(row) is int and row in range(len(rows)) for row in chosen)
    if not known or not chosen:
        raise AttachError(f"rows={chosen!r} must list some of the attached rows, which are 0 to {len(rows) - 1}.")
    return set(chosen)
