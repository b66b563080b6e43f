"""The process that runs SGLang's code for plans, forked from the one with the libraries.

It imports what plans need besides, and forks for each tree. That fork imports the tree's SGLang and
forks for each Request, as SGLang's configuration belongs to a process.

A message on its standard input, a socket, is a tree's folder, with two files: a stream that has
Requests (JSON, one a line) until its end and takes a TreePlan (JSON, one a line) for each, and a
log for SGLang's words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from kvgeom.deployment.spec import Request

_IMPORTS = ("scipy.stats", "datasets")  # that no engine needs


def main() -> None:
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):  # SGLang tells, where it needs it
            importlib.import_module(name)
    gc.freeze()  # SGLang's own collections must not touch, and so copy, what forks share
    asked = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # SGLang's
    while True:
        folder, files, *_ = socket.recv_fds(asked, 4096, 2)
        if not files:  # the caller has gone
            os.killpg(0, signal.SIGKILL)
        _fork(_plan_all, os.fsdecode(folder), *files)
        for file in files:
            os.close(file)


def _fork(function: Callable, *arguments) -> int:
    """Calls `function` in a process of its own, whose id is returned."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def _plan_all(folder: str, stream: int, log: int) -> None:
    """Answer the requests in `stream` with the SGLang in `folder`."""
    for output in (1, 2):
        os.dup2(log, output)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
    from kvgeom.deployment import build

    with open(stream, closefd=False) as lines:
        requests = [Request(**json.loads(line)) for line in lines]
    build.preload(requests)
    gc.freeze()
    for request in requests:
        os.waitpid(_fork(_plan, request, stream), 0)


def _plan(request: Request, stream: int) -> None:
    from kvgeom.deployment import build

    answer = dataclasses.asdict(build.plan(request))
    with open(stream, "w") as out:
        out.write(json.dumps(answer) + "\n")
