"""The commands that are interrupted. A new one is an entry in OPERATIONS."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    the group is the memory's name. kills: calls at which it is killed in the test run.
    """

    setup: tuple[str, ...]
    command: str
    reports: str
    kills: int = 68

    def reported(self, output: str) -> list[str]:
        """The memories that the command said to be done."""
        return re.findall(self.reports, output, re.MULTILINE)


INDEX_ONE = "index {one} --model stub --store {store}"
INDEX_TWO = "index {two} --model stub --store {store}"
KEEP = "reindex esther --store {store} --backend hnsw --option m=4"

OPERATIONS = {
    "index": Operation((INDEX_ONE, KEEP), INDEX_TWO, r"^(\w+): \d+ tokens"),
    "reindex": Operation((INDEX_ONE, KEEP), KEEP.replace("m=4", "m=8"), r"^(\w+): hnsw, built"),
    "remove": Operation((INDEX_ONE, INDEX_TWO, KEEP), "remove esther joel --store {store}", r"^Removed (\w+)\."),
}
