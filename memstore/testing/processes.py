"""Other processes, in which the kits look at what a plugin kept."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

_SPAWN = get_context("spawn")  # such a process inherits nothing
_KILLED = 9
_open: list[Connection] = []  # to the one process for all checks of a session, because starting one takes seconds


def in_another_process(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """What ``function`` returns in another process. Raises AssertionError if it fails there, or the process ends."""
    call = _pickled(function, args, kwargs)
    if not _open:
        ours, theirs = _SPAWN.Pipe()
        _SPAWN.Process(target=_serve, args=(theirs,), daemon=True).start()
        theirs.close()
        _open.append(ours)
    try:
        _open[0].send_bytes(call)
        result, failure = pickle.loads(_open[0].recv_bytes())  # noqa: S301 - from the process started here
    except (EOFError, OSError) as error:
        _open.pop().close()
        raise AssertionError(
            f"Another process was ended from outside while it ran {function.__name__}. So ends who writes to memory "
            "that is read-only, or reads memory whose file was closed."
        ) from error
    assert failure is None, failure
    answer: Result = result
    return answer


def in_a_killed_process(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run ``function`` in a process of its own, which then ends without closing anything."""
    process = _SPAWN.Process(target=_run_and_end, args=(_pickled(function, args, kwargs),))
    process.start()
    process.join()
    assert process.exitcode == _KILLED, f"{function.__name__} failed in another process, which says why on stderr."


def _serve(connection: Connection) -> None:
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((_run(call), None))
        except Exception:
            answer = pickle.dumps((None, f"In another process:\n{traceback.format_exc()}"))
        connection.send_bytes(answer)  # not send, with which torch would share memory


def _run_and_end(call: bytes) -> NoReturn:
    _kept = _run(call)  # locks and writers, alive until the end
    os._exit(_KILLED)


def _run(packed: bytes) -> Any:
    sys.path[:], call = pickle.loads(packed)  # noqa: S301 - from the process that started this one
    function, args, kwargs = pickle.loads(call)  # noqa: S301
    return function(*args, **kwargs)


def _pickled(*call: Any) -> bytes:
    try:
        return pickle.dumps((sys.path, pickle.dumps(call)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(
            f"Another process must be able to import what is tested: {error}. Define it in a module of its own."
        ) from error
