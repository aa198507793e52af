"""Many cases in forked children: one that ends its process is seen, and costs the others nothing but a fork."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LONGEST = 60.0  # seconds that a case may take, on a machine that does other things too, before it counts as hanging


class Failure(NamedTuple):
    """What went wrong in a case: an exception's text, the signal that ended the process, or that it hung."""

    case: object
    what: str


def run(cases: Sequence[T], check: Callable[[T], str]) -> tuple[list[str], list[Failure]]:
    """What ``check`` said of each case, in order, and of which cases it raised or ended the process."""
    answers: list[str] = []
    failures: list[Failure] = []
    while len(answers) < len(cases):
        said, ended = _child(cases[len(answers) :], check)
        for answer in said:
            if answer.startswith("!"):
                failures.append(Failure(cases[len(answers)], answer[1:]))
            answers.append(answer)
        if ended and len(answers) < len(cases):
            failures.append(Failure(cases[len(answers)], ended))
            answers.append(f"!{ended}")
    return answers, failures


def _child(cases: Sequence[T], check: Callable[[T], str]) -> tuple[list[str], str | None]:
    """The answers of one child, and what ended it before it had answered for all."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(writing, cases, check)
    os.close(writing)
    data, ended = b"", None
    while True:
        if not select.select([reading], [], [], LONGEST)[0]:
            os.kill(pid, signal.SIGKILL)
            ended = f"it took longer than {LONGEST} seconds"
            break
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        data += piece
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if ended is None and status:
        code = os.waitstatus_to_exitcode(status)
        ended = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return [answer.decode() for answer in data.split(b"\0")[:-1]], ended


def _answer(fd: int, cases: Sequence[T], check: Callable[[T], str]) -> None:
    try:
        for case in cases:
            try:
                answer = check(case)
            except BaseException:
                answer = "!" + traceback.format_exc()
            os.write(fd, answer.replace("\0", "?").encode("utf-8", "replace") + b"\0")
    finally:
        os._exit(0)  # nothing of the test run is to happen twice
