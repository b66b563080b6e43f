"""The caller's side: a child that plans on every tree."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from kvgeom.cpu_engine.libraries import SETTINGS, Libraries, Main, environment, libraries
from kvgeom.cpu_engine.spec import decode
from kvgeom.deployment.spec import Request, TreePlan
from kvgeom.errors import KvgeomError

_TIMEOUT_S = 300.0  # to the next answer

Ask = Callable[..., list[TreePlan]]


@contextmanager
def planner(running: Libraries | None = None) -> Iterator[Ask]:
    """`ask(package, *requests)`: what the SGLang in `package`, which is only read, makes of each.

    Forked from the libraries in `running`, or from some of its own. It may be called by several
    threads. KvgeomError where there is no answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        libraries(running) as from_libraries,
        ours,
        theirs,
        tempfile.TemporaryDirectory(prefix="kvgeom-") as scratch,
    ):
        settings = SETTINGS | {"TMPDIR": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
        log = from_libraries.log
        child = from_libraries.fork(
            Main("kvgeom.deployment.child", [], environment(settings)),
            stdin=theirs,
            stdout=log,
            stderr=log,
        )
        theirs.close()
        try:
            yield lambda package, *requests: _ask(ours, log, package, requests)
        finally:
            child.end()


def _ask(
    child: socket.socket, child_log: TextIO, package: Path, requests: tuple[Request, ...]
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
            for file in (log, child_log):
                file.seek(0)
            said = (log.read() or child_log.read()).strip() or "none"
            raise KvgeomError(
                f"SGLang in {package} gave no plan; its last line: {said.splitlines()[-1]}",
                "`kvgeom status` tells whether that SGLang is as released",
            )
    return [decode(TreePlan, json.loads(answer)) for answer in answers]
