"""The commands that are interrupted. A new one is an entry in OPERATIONS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LINE = "In the beginning was the Word, and the Word was with God.\n"

# Folders of documents, which commands name as {one} or {two}; in characters, as many as tokens.
DOCUMENTS = {
    "one": {"esther": LINE * 6, "ruth": LINE},
    "two": {"jonah": LINE * 6, "joel": "The word of the Lord."},
}


@dataclass(frozen=True)
class Operation:
    """A command line that is killed, and repeated.

    setup: what ran before it. Both may name {store}, {scratch} (a folder for other files, which the setup may fill)
    and the folders of DOCUMENTS. reports: what the command writes once a memory is as it is to be after the command;
    the group is the memory's name. edits: what is done to documents between them, None for one that is removed.
    """

    setup: tuple[str, ...]
    command: str
    reports: str
    edits: Mapping[str, str | None] = field(default_factory=dict)

    def reported(self, output: str) -> list[str]:
        """The memories that the command said to be done."""
        return re.findall(self.reports, output, re.MULTILINE)


INDEX_ONE = "index {one} --model stub --store {store}"
INDEX_TWO = "index {two} --model stub --store {store}"
KEEP = "reindex esther --store {store} --backend hnsw --option m=4"

SYNC = "sync {one} --model stub --store {store}"
ELSEWHERE = INDEX_TWO.replace("{store}", "{scratch}/other")

KILLS = 45  # of each operation, in the test run

OPERATIONS = {
    "index": Operation((INDEX_ONE, KEEP), INDEX_TWO, r"^(\w+): \d+ tokens"),
    "reindex": Operation((INDEX_ONE, KEEP), KEEP.replace("m=4", "m=8"), r"^(\w+): hnsw, built"),
    "remove": Operation((INDEX_ONE, INDEX_TWO, KEEP), "remove esther joel --store {store}", r"^Removed (\w+)\."),
    "sync": Operation(
        (SYNC, KEEP),
        SYNC,
        r"^(?:added|changed|removed) (\w+)",
        {
            "one/esther.txt": LINE * 5 + "And the Word was made flesh.\n" + LINE,
            "one/ruth.txt": None,
            "one/amos.txt": LINE,
        },
    ),
    "adopt": Operation((INDEX_ONE, KEEP), SYNC, r"^(?:added|changed|removed) (\w+)", {"one/amos.txt": LINE}),
    "import": Operation(
        (INDEX_ONE, ELSEWHERE, "export * {scratch}/exported --store {scratch}/other"),
        "import {scratch}/exported --store {store}",
        r"^(\w+): \d+ tokens",
    ),
}
