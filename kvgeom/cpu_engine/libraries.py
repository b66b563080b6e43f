"""One process imports the third-party libraries; those that run SGLang are forked from it.

    python -m kvgeom.cpu_engine.libraries SOCKET SCRATCH

A message on SOCKET has four files: a stream, and what becomes standard input, output and error.
The stream has a Main (JSON) until its end and takes the fork's process id. A fork is a session
of its own; whoever asked for it ends it, or it ends itself when its standard input is closed. It is
not reaped while the libraries' process lives, so that its id stays its own.

The libraries' process ends when the other end of SOCKET is closed, however that comes, and removes
SCRATCH, a new folder for temporary files that imports make.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from kvgeom.cpu_engine.frames import with_room
from kvgeom.cpu_engine.gates import ENVIRONMENT

# What an engine and a plan both need. None of them imports SGLang, or the parts of transformers
# that SGLang changes.
IMPORTS = (
    "kvgeom.deployment.build",
    "torchvision",
    "transformers",
    "flashinfer",
    "openai.types.responses",
    "fastapi",
    "gguf",
    "aiohttp",
)
# The CPU engine's own, but that SGLang is not told to serve on a CPU.
SETTINGS = {k: v for k, v in ENVIRONMENT.items() if k != "SGLANG_USE_CPU_ENGINE"}
_KILLED_SECONDS = 10.0  # for a killed process to go


def environment(settings: dict[str, str], *path: Path) -> dict[str, str]:
    """This process's, changed by `settings`; `path`, then this kvgeom, are first to be imported."""
    ours = Path(__file__).resolve().parents[2]
    folders = [*map(str, path), str(ours), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(folders)}


@dataclass(frozen=True)
class Main:
    """`main()` of a module, with the arguments and the environment that it is to see."""

    module: str
    arguments: list[str]
    environment: dict[str, str]


class Fork:
    """A process forked from the libraries'."""

    def __init__(self, stream: socket.socket):
        self._stream = stream
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        """Its process id and that of its group; None while the libraries are being imported."""
        if self._pid is None and select.select([self._stream], [], [], 0)[0]:
            with contextlib.suppress(ConnectionError):
                self._pid = int(self._stream.recv(32) or 0) or None
        return self._pid

    def end(self, seconds: float = 0) -> None:
        """Kill its group, after the `seconds` that it may take to end by itself."""
        if self.pid is not None:
            self._wait(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait(_KILLED_SECONDS)
        self._stream.close()  # a fork whose id nobody takes does nothing

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(self.pid)
            try:
                select.select([process], [], [], seconds)
            finally:
                os.close(process)


class Libraries:
    """The caller's side of the libraries' process. Use it through `libraries()`."""

    def __init__(self) -> None:
        # What it and the forks without a log of their own print.
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by close()
        self._scratch = tempfile.mkdtemp(prefix="kvgeom-")
        self._asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvgeom.cpu_engine.libraries",
                    str(asked.fileno()),
                    self._scratch,
                ],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env=environment(SETTINGS | {"TMPDIR": self._scratch}),
                pass_fds=[asked.fileno()],
                start_new_session=True,
            )

    def fork(self, main: Main, *, stdin: IO, stdout: IO, stderr: IO) -> Fork:
        """Does not wait for the imports; where they fail, the fork's files are closed."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # it has ended, and `log` says why
            files = [file.fileno() for file in (theirs, stdin, stdout, stderr)]
            socket.send_fds(self._asking, [b"fork"], files)
            ours.sendall(json.dumps(asdict(main)).encode())
            ours.shutdown(socket.SHUT_WR)
        return Fork(ours)

    def close(self) -> None:
        """End the libraries' process. Its forks are to be ended before."""
        self._process.kill()
        self._process.wait()
        self._asking.close()
        self.log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def libraries(running: Libraries | None = None) -> Iterator[Libraries]:
    """`running`, or where there is none a process that ends with the block."""
    if running is not None:
        yield running
        return
    started = Libraries()
    try:
        yield started
    finally:
        started.close()


def main() -> None:
    """Import, then fork until the caller has gone."""
    from kvgeom.cpu_engine import stub

    number, scratch = sys.argv[1:]
    asked = socket.socket(fileno=int(number))
    gc.disable()  # what an import makes stays
    stub.install()  # the installed kernels need libcuda
    for name in IMPORTS:
        with contextlib.suppress(Exception):  # SGLang tells, where it needs it
            importlib.import_module(name)
    with contextlib.suppress(ImportError):  # finds what it changes by the first environment
        importlib.import_module("setproctitle").getproctitle()
    gc.freeze()  # collections must not touch, and so copy, what forks share
    sys.stdout.flush()  # or every fork does
    while files := socket.recv_fds(asked, 16, 4)[1]:
        if os.fork() == 0:
            asked.close()
            _be(*files)
        for file in files:
            os.close(file)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _be(stream: int, *standard: int) -> None:
    """What the caller asks for on `stream`, and never back into the loop above."""
    try:
        os.setsid()
        for number, file in enumerate(standard):
            os.dup2(file, number)
            os.close(file)
        with socket.socket(fileno=stream) as caller:
            asked = Main(**json.load(caller.makefile()))
            _take(asked.environment)
            sys.argv = [asked.module, *asked.arguments]
            caller.sendall(str(os.getpid()).encode())
        importlib.import_module(asked.module).main()
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _take(environment: dict[str, str]) -> None:
    """The environment, and what Python has made of the libraries' own."""
    os.environ.clear()
    os.environ.update(environment)
    path = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None


if __name__ == "__main__":
    with_room(main)  # forks have it too
