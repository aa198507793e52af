"""A process that has imported everything and forks a child for each call, so that a child costs milliseconds.

python -m tests.faults.server MODEL < calls     a call is a line of JSON: {"call": name, "arguments": {…}, "folder": …},
or {"wait": pid}

The shim (shim.c) is loaded into it, so a child can be ended at any call by which it changes a file.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Server:
    """The client's side. ``model``: "stub", or "real" for that of the demo."""

    def __init__(self, folder: Path, model: str = "stub") -> None:
        self.folder = folder
        shim, plugins, self._children = folder / "shim.so", folder / "plugins", 0
        compiler = shutil.which("cc") or shutil.which("c++") or "cc"
        source = Path(__file__).with_name("shim.c")
        options = ["-x", "c", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"]
        subprocess.run([compiler, *options], check=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(plugins), *(path for path in sys.path if path)]),
            "LD_PRELOAD": str(shim),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.faults.server", model]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=folder, text=True
        )

    def start(self, call: str, **arguments: Any) -> Child:
        """Fork a child that calls this function of tests/faults/children.py."""
        self._children += 1
        folder = self.folder / f"child-{self._children}"
        folder.mkdir()
        return Child(self, self._ask({"call": call, "arguments": arguments, "folder": str(folder)}), folder)

    def call(self, call: str, **arguments: Any) -> Any:
        """What the function returns in a child, which must end well."""
        return self.start(call, **arguments).result()

    def wait(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server ended"
        return int(answer)


class Child:
    """A forked child. ``output`` and ``errors`` are what it wrote, ``status`` is negative for a signal."""

    def __init__(self, server: Server, pid: int, folder: Path) -> None:
        self.server, self.pid, self.folder = server, pid, folder
        self.status: int | None = None

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(self.server.wait(self.pid))
            self.output, self.errors = ((self.folder / name).read_text() for name in ("output", "errors"))
            told = self.folder / "told"
            self.told: list[Any] = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
            shutil.rmtree(self.folder)
        return self.status

    def result(self) -> Any:
        assert self.wait() == 0, f"status {self.status}: {self.errors}"
        return self.told[-1]


def tell(value: Any) -> None:
    """In a child: note something that its parent finds in ``told``, however the child ends."""
    with Path("told").open("a") as file:
        file.write(json.dumps(value) + "\n")


def shim() -> Any:
    """In a child: the functions of shim.c."""
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.faults_count.restype = ctypes.c_long
    library.faults_kill_after.argtypes = [ctypes.c_double]
    return library


def _serve() -> None:
    from tests.faults import children

    children.prepare(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, answer = os.waitpid(question["wait"], 0)
        else:
            answer = os.fork()
            if not answer:
                _run(getattr(children, question["call"]), question["arguments"], question["folder"])
        print(answer, flush=True)


def _run(function: Any, arguments: dict[str, Any], folder: str) -> None:
    status = 1
    try:
        os.chdir(folder)
        for name, number in (("output", 1), ("errors", 2)):
            fd = os.open(name, os.O_WRONLY | os.O_CREAT)
            os.dup2(fd, number)
        tell(function(**arguments))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    from tests.faults import server

    server._serve()
