"""The caller's side: starts the imported parent, sends it specs, folds messages into reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvgeom.cpu_engine.gates import CUDA_ENVIRONMENT, ENVIRONMENT
from kvgeom.cpu_engine.libraries import Fork, Libraries, Main, environment, libraries
from kvgeom.cpu_engine.spec import (
    EngineError,
    EngineReport,
    EngineSetupError,
    EngineSpec,
    RankGeometry,
    Violation,
    decode,
)

OnEvent = Callable[[str, str], None]
IMPORT_SECONDS = 600.0  # 10 on a quiet machine
GRACE_SECONDS = 15.0  # for the parent to end its engine and clean up


def _short_folder() -> str:
    """The folder for temporary files, or /tmp where a socket's path in it would be too long."""
    folder = tempfile.gettempdir()
    return folder if len(folder) < 64 else "/tmp"


def _quiet(stage: str, detail: str) -> None:
    pass


class _Started(subprocess.Popen):
    """A parent for CUDA, which does not outlive a fork."""

    def end(self, seconds: float) -> None:
        """As a Fork's."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Session:
    """One imported parent process. Use it through `session()`."""

    def __init__(self, tree: Path | None, device: str, forked_from: Libraries | None):
        if tree is not None and not (tree / "sglang").is_dir():
            raise EngineSetupError(f"no sglang package in {tree}")
        self.release = ""
        self._buffer = b""
        self._scratch = Path(tempfile.mkdtemp(prefix="kvgeom-", dir=_short_folder()))
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  close()
        self._libraries = forked_from
        asked, asks = os.pipe()
        answers, answered = os.pipe()
        self._asks, self._answers = os.fdopen(asks, "wb"), answers
        with os.fdopen(asked) as asked, os.fdopen(answered) as answered:
            self._process = self._start(tree, device, asked, answered)

    def _start(self, tree: Path | None, device: str, stdin: IO, stdout: IO) -> Fork | _Started:
        path = [tree.resolve()] if tree is not None else []
        settings = ENVIRONMENT if device == "cpu" else CUDA_ENVIRONMENT
        # Before an import of the parent can ask for it.
        settings = settings | {"TMPDIR": str(self._scratch)}
        main = Main(
            "kvgeom.cpu_engine.parent", [str(self._scratch), device], environment(settings, *path)
        )
        files = {"stdin": stdin, "stdout": stdout, "stderr": self._stderr}
        if self._libraries is not None:
            return self._libraries.fork(main, **files)
        command = [sys.executable, "-m", main.module, *main.arguments]
        return _Started(command, env=main.environment, start_new_session=True, **files)

    def run(
        self, spec: EngineSpec, *, on_event: OnEvent | None = None, timeout: float = 300.0
    ) -> EngineReport:
        """Boot an engine for `spec`, serve its prompts, end it. `timeout` in seconds.

        A failure of the engine is in the report; EngineSetupError means there was no engine.
        """
        on_event = on_event or _quiet
        self.wait_ready(on_event)
        spec = spec.resolved()
        request = json.dumps({"spec": dataclasses.asdict(spec), "timeout": timeout})
        self._asks.write(request.encode() + b"\n")
        self._asks.flush()
        fold = _Fold(EngineReport(spec=spec, release=self.release), on_event)
        deadline = time.monotonic() + timeout + GRACE_SECONDS
        while (message := self._receive(deadline))["kind"] != "end":
            fold.take(message)
        return fold.finish(message)

    def wait_ready(self, on_event: OnEvent = _quiet) -> None:
        """Wait for the import, which the first run does by itself."""
        if self.release:
            return
        on_event("import", "sglang")
        message = self._receive(time.monotonic() + IMPORT_SECONDS)
        if message["kind"] == "refused":
            raise EngineSetupError(message["message"])
        self.release = message["release"]
        on_event("import", f"sglang {self.release}")

    def close(self) -> None:
        """End the parent and whatever runs below it."""
        with contextlib.suppress(OSError):
            self._asks.close()
        self._process.end(GRACE_SECONDS if self.release else 0)
        os.close(self._answers)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._stderr.close()

    def _receive(self, deadline: float) -> dict:
        pipe = self._answers
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise EngineSetupError(f"the engine's parent gave no answer; {self._last_words()}")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                raise EngineSetupError(f"the engine's parent ended; {self._last_words()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        lines = []
        for log in [*([self._libraries.log] if self._libraries else []), self._stderr]:
            log.seek(0)
            lines += log.read().strip().splitlines()
        return f"its last line: {lines[-1]}" if lines else "it wrote nothing"


class _Fold:
    """Builds a report from the messages of one run."""

    def __init__(self, report: EngineReport, on_event: OnEvent):
        self.report, self.on_event = report, on_event
        self.stage = "boot"
        self.drafted: dict[str, list] = {}  # by request
        self.draft_rows: dict[str, dict[int, str]] = {}  # by request and rank
        self.total = len(report.spec.prompts) * report.spec.max_new_tokens

    def take(self, message: dict) -> None:
        """Take one message in."""
        getattr(self, "_" + message.pop("kind"))(**message)

    def _stage(self, stage: str, detail: str) -> None:
        self.stage = stage
        self.on_event(stage, detail)

    def _tokens(self, count: int) -> None:
        self.on_event("serve", f"{min(count, self.total)}/{self.total} tokens")

    def _geometry(self, geometry: dict) -> None:
        self.report.geometry.append(decode(RankGeometry, geometry))
        self.report.geometry.sort(key=lambda g: g.rank)

    def _usage(self, usage: float) -> None:
        self.report.peak_token_usage = max(self.report.peak_token_usage, usage)

    def _row_end(self, end: int) -> None:
        self.report.max_req_to_token_end = max(self.report.max_req_to_token_end, end)

    def _transfer(self, way: str, rows: int) -> None:
        self.report.host_rows[way] = self.report.host_rows.get(way, 0) + rows

    def _drafted(self, request: str, tokens: list[int]) -> None:
        self.drafted.setdefault(request, []).append(tokens)

    def _draft_rows(self, request: str, rank: int, digest: str) -> None:
        self.draft_rows.setdefault(request, {})[rank] = digest

    def _busy(self, rank: int) -> None:
        self.report.idle_ranks = [r for r in self.report.idle_ranks if r != rank]

    def _idle(self, rank: int) -> None:
        self.report.idle_ranks = sorted({*self.report.idle_ranks, rank})

    def _violation(self, violation: dict) -> None:
        self.report.violations.append(decode(Violation, violation))

    def _error(self, **fields) -> None:
        if self.report.error is None:  # what follows is its consequence
            self.report.error = EngineError(**fields)

    def _result(self, replies: list[dict]) -> None:
        report = self.report
        report.outputs = [reply["tokens"] for reply in replies]
        report.logprobs = [reply["logprobs"] for reply in replies]
        report.accept_lengths = [reply["accept_length"] for reply in replies]
        report.cached_tokens = [reply["cached_tokens"] for reply in replies]
        requests = [reply["request"] for reply in replies]
        report.drafted = [self.drafted.get(request, []) for request in requests]
        report.draft_rows = [
            [digest for _, digest in sorted(self.draft_rows.get(request, {}).items())]
            for request in requests
        ]

    def finish(self, end: dict) -> EngineReport:
        """The report, once the engine is gone."""
        report = self.report
        report.seconds, report.peak_rss_mb = end["seconds"], end["peak_rss_mb"]
        report.violations.sort(key=lambda v: v.rank)
        stage = "serve" if self.stage == "serve" else "boot"
        if report.error is None and not report.outputs:
            if end["reason"] == "timeout":
                message = f"no result after {end['seconds']:.0f} s, in stage {self.stage}"
                report.error = EngineError(stage, "TimeoutError", message)
            else:
                message = "the engine ended without a result"
                report.error = EngineError(stage, "EngineDied", message, traceback=end["log"])
        return report


@contextlib.contextmanager
def session(
    tree: Path | None = None, device: str = "cpu", running: Libraries | None = None
) -> Iterator[Session]:
    """A parent that has imported sglang from `tree` (None: the installed one) once.

    Each `.run(spec)` forks a fresh engine from it; on CUDA it starts one, with no gate open and
    nothing stood in for. It is itself forked from the libraries in `running`, or from some of its
    own. Nothing it started is left when the block ends.
    """
    with contextlib.ExitStack() as held:
        forked_from = held.enter_context(libraries(running)) if device == "cpu" else None
        current = Session(Path(tree) if tree is not None else None, device, forked_from)
        held.callback(current.close)
        yield current


def run(
    spec: EngineSpec,
    *,
    tree: Path | None = None,
    on_event: OnEvent | None = None,
    timeout: float = 300.0,
) -> EngineReport:
    """One engine in a session of its own. See `Session.run`."""
    with session(tree, spec.device) as current:
        return current.run(spec, on_event=on_event, timeout=timeout)
