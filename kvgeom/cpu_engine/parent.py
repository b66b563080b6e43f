"""The imported parent: imports sglang once, then forks an engine for every spec it is given.

It is forked from the libraries' process (`libraries`). On CUDA it imports nothing, and is started:

    python -m kvgeom.cpu_engine.parent SCRATCH cuda

Reads one spec (JSON) a line from standard input; writes messages (JSON) a line to standard output.
An engine lives in a session of its own and does not outlive its run; when standard input closes,
the parent ends the running engine and itself. Temporary files go into SCRATCH, a new folder that
the parent removes when it ends.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvgeom.cpu_engine import gates, interpreter, processes
from kvgeom.cpu_engine.channel import PACKET, Channel
from kvgeom.cpu_engine.spec import EngineSetupError, EngineSpec

SAMPLE_SECONDS = 5.0  # between two looks at the memory in use
ERROR_SECONDS = 15.0  # for the other ranks' words and SGLang's own end after a first error
LOG_TAIL = 3000  # characters of an engine's own output kept when it dies without a word
# Modules with the Triton kernels that take the interpreter longest to rewrite.
KERNELS = (
    "sglang.kernels.ops.attention.dcp_kernels",
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.speculative.cache_locs",
)
# Imported once, before the ranks are forked.
FORKED_WITH = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # every model
    "sglang.srt.speculative.standalone_worker_v2",
    *KERNELS,
)


def sglang_release() -> str:
    """The release of the sglang on the path, from its `_version.py`, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise EngineSetupError("no sglang here: install kvgeom[engine] or point --tree at one")
    version = Path(spec.origin).with_name("_version.py")
    if not version.exists():
        raise EngineSetupError(f"{version.parent} does not say which release it is")
    return runpy.run_path(str(version))["__version__"]


def import_sglang() -> str:
    """Import everything an engine needs, gates open; returns the release.

    The libraries' process leaves the collector off, as what an import makes stays; it is on after.
    """
    release = sglang_release()
    gates.check_release(release)
    gates.install(release)
    gates.import_all()
    for name in FORKED_WITH:
        importlib.import_module(name)
    for name in KERNELS:
        interpreter.rewrite_kernels(importlib.import_module(name))
    # What is here now is shared by every rank: a collection there must not touch, and so copy, it.
    gc.collect()
    gc.freeze()
    gc.enable()
    return release


class Supervisor:
    """Relays one engine's messages until it is gone."""

    def __init__(self, out, spec: EngineSpec, timeout: float):
        self.out, self.spec, self.timeout = out, spec, timeout
        self.peak_mb = 0
        self.failed: set[int | None] = set()  # ranks that sent an error; None: the engine

    def run(self) -> bool:
        """Run the engine; False when standard input closed meanwhile."""
        scratch = Path(tempfile.mkdtemp(prefix="engine-"))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = time.monotonic()
        if self.spec.device == "cpu":
            pid = os.fork()
            if pid == 0:
                ours.close()
                _be_engine(self.spec, Channel(theirs), scratch)
        else:
            pid = _start_engine(self.spec, theirs, scratch)
        theirs.close()
        try:
            reason = self._relay(ours, pid, started)
        finally:
            processes.end(pid)
            self._drain(ours)
            ours.close()
            tail = _tail(scratch / "engine.log")
            shutil.rmtree(scratch, ignore_errors=True)
        seconds = time.monotonic() - started
        log = tail if reason == "exit" and not self.failed else ""
        self._write(
            {
                "kind": "end",
                "reason": reason,
                "seconds": seconds,
                "peak_rss_mb": self.peak_mb,
                "log": log,
            }
        )
        return reason != "closed"

    def _relay(self, sock: socket.socket, pid: int, started: float) -> str:
        next_sample, deadline = 0.0, started + self.timeout
        while True:
            now = time.monotonic()
            if self.failed:
                deadline = min(deadline, now + ERROR_SECONDS)
            if now > deadline:
                return "timeout"
            if now >= next_sample:
                taken = processes.memory_mb(pid, forked=self.spec.device == "cpu")
                self.peak_mb = max(self.peak_mb, taken)
                next_sample = now + SAMPLE_SECONDS
            ready, _, _ = select.select([sock, sys.stdin], [], [], 0.5)
            if sys.stdin in ready:
                return "closed"
            if sock in ready:
                packet = sock.recv(PACKET)
                if not packet:
                    return "exit"
                if self._pass_on(packet):
                    return "done"
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return "exit"  # not reaped yet, so that its id stays its own

    def _drain(self, sock: socket.socket) -> None:
        """Take what was sent before the engine ended."""
        sock.setblocking(False)
        try:
            while packet := sock.recv(PACKET):
                self._pass_on(packet)
        except (BlockingIOError, ConnectionError):
            pass

    def _pass_on(self, packet: bytes) -> bool:
        """Whether that was all: a result, or an error of every rank."""
        message = json.loads(packet)
        if message["kind"] == "error":
            self.failed.add(message["rank"])
        self._write(message)
        return message["kind"] == "result" or self.failed >= {*range(self.spec.tp)}

    def _write(self, message: dict) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()


def _start_engine(spec: EngineSpec, sock: socket.socket, scratch: Path) -> int:
    """A new process for the engine: CUDA does not outlive a fork."""
    with (scratch / "engine.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kvgeom.cpu_engine.started", str(sock.fileno()), str(scratch)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "KVGEOM_ENGINE_SPEC": spec.to_json()},
            pass_fds=[sock.fileno()],
            start_new_session=True,
        ).pid


def _be_engine(spec: EngineSpec, channel: Channel, scratch: Path) -> None:
    """The forked child: an own session, its output in a file, and never back into the parent."""
    try:
        os.setsid()
        _die_with_parent()
        log = os.open(scratch / "engine.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from kvgeom.cpu_engine.engine import run_engine

        run_engine(spec, channel, scratch)
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tail(log: Path) -> str:
    try:
        return log.read_text(errors="replace")[-LOG_TAIL:]
    except OSError:
        return ""


def main() -> None:
    """Import, then serve specs until standard input closes."""
    scratch, device = sys.argv[1:]
    try:
        _serve(device)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _serve(device: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever sglang prints must not get between our messages
    try:
        release = import_sglang() if device == "cpu" else sglang_release()
        gates.check_release(release)
    except (EngineSetupError, ImportError) as error:
        out.write(json.dumps({"kind": "refused", "message": str(error)}) + "\n")
        out.flush()
        sys.exit(1)
    out.write(json.dumps({"kind": "ready", "release": release}) + "\n")
    out.flush()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        spec = EngineSpec.from_json(json.dumps(request["spec"]))
        if not Supervisor(out, spec, request["timeout"]).run():
            break


if __name__ == "__main__":
    main()
