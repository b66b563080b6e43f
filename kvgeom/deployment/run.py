"""The caller's side: a child that plans on every tree."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgeom.cpu_engine.gates import ENVIRONMENT
from kvgeom.cpu_engine.spec import decode
from kvgeom.deployment.spec import Request, TreePlan
from kvgeom.errors import KvgeomError

_TIMEOUT_S = 300.0  # to the next answer
# The CPU engine's own settings, but that SGLang is not told to serve on a CPU.
_SETTINGS = {k: v for k, v in ENVIRONMENT.items() if k != "SGLANG_USE_CPU_ENGINE"}

Ask = Callable[..., list[TreePlan]]


@contextmanager
def planner() -> Iterator[Ask]:
    """`ask(package, *requests)`: what the SGLang in `package`, which is only read, makes of each.

    It may be called by several threads. KvgeomError where there is no answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, tempfile.TemporaryDirectory(prefix="kvgeom-") as scratch:
        log = Path(scratch, "log")
        child = _start(theirs, log, scratch)
        theirs.close()
        try:
            yield lambda package, *requests: _ask(ours, log, package, requests)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _start(asked: socket.socket, log: Path, scratch: str) -> subprocess.Popen:
    ours = Path(__file__).resolve().parents[2]
    path = [str(ours), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "TMPDIR": scratch,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "kvgeom.deployment.child", str(asked.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **_SETTINGS, **settings},
            pass_fds=[asked.fileno()],
            start_new_session=True,
        )


def _ask(
    child: socket.socket, child_log: Path, package: Path, requests: tuple[Request, ...]
) -> list[TreePlan]:
    asked = "".join(json.dumps(dataclasses.asdict(request)) + "\n" for request in requests)
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile("w+", errors="replace") as log:
        ours.settimeout(_TIMEOUT_S)
        try:
            socket.send_fds(child, [os.fsencode(package.parent)], [theirs.fileno(), log.fileno()])
            theirs.close()
            ours.sendall(asked.encode())
            ours.shutdown(socket.SHUT_WR)
            answers = ours.makefile().read().splitlines()
        except TimeoutError:
            raise KvgeomError(
                f"no plan from {package} after {_TIMEOUT_S:g} s", "run the command again"
            ) from None
        except ConnectionError:  # it has ended
            answers = []
        if len(answers) != len(requests):
            log.seek(0)
            said = (log.read() or child_log.read_text(errors="replace")).strip() or "none"
            raise KvgeomError(
                f"SGLang in {package} gave no plan; its last line: {said.splitlines()[-1]}",
                "`kvgeom status` tells whether that SGLang is as released",
            )
    return [decode(TreePlan, json.loads(answer)) for answer in answers]
