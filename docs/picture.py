"""Draw what `memstore demo` prints on a terminal: docs/demo.svg, the picture in README.md.

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).with_name("demo.svg")
WIDTH = 100  # columns
TERMINAL = {
    "COLORTERM": "truecolor",
    "COLUMNS": str(WIDTH),
    "FORCE_COLOR": "1",
    "NO_COLOR": "",
    "TERM": "xterm-256color",
}
STILL = {"TTY_INTERACTIVE": "0"}  # nothing that moves
FORMAT = re.sub(r"@font-face {{.*?}}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # a picture that loads no fonts


def draw(arguments: Sequence[str]) -> str:
    """The SVG of a memstore command's standard output; its progress, on standard error, stays on the terminal."""
    command = [sys.executable, "-c", "from memstore.cli import main; main()", *arguments]
    shown = subprocess.run(
        command, env=os.environ | TERMINAL | STILL, stdout=subprocess.PIPE, check=True, encoding="utf-8"
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(shown.stdout.rstrip()))
    return console.export_svg(title=" ".join(("memstore", *arguments)), code_format=FORMAT)


if __name__ == "__main__":
    PICTURE.write_text(draw(["demo"]), encoding="utf-8")
