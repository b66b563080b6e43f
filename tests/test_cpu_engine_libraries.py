"""The process that imports the third-party libraries, and what is forked from it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from plan_answers import asked

from kvgeom.cpu_engine import EngineSetupError, session
from kvgeom.cpu_engine.libraries import Fork, Libraries, Main, environment, libraries
from kvgeom.deployment.run import planner
from kvgeom.errors import KvgeomError

pytestmark = pytest.mark.engine

TELLS = """
import json, os, subprocess, sys, tempfile

def main():
    told = {
        "arguments": sys.argv[1:],
        "path": sys.path[0],
        "environment": [os.environ.get(name) for name in ("HERE", "THERE")],
        "child": subprocess.check_output(["printenv", "HERE"], text=True),
        "temporary": tempfile.gettempdir(),
        "writes_bytecode": not sys.dont_write_bytecode,
        "parent": os.getppid(),
        "group": os.getpgid(0) == os.getsid(0) == os.getpid(),
        "libraries": [name in sys.modules for name in ("torch", "transformers", "sglang")],
        "stdin": sys.stdin.read(),
    }
    print(json.dumps(told), flush=True)
    raise RuntimeError("the last word")
"""
WAITS = "import time\n\ndef main():\n    print('up', flush=True)\n    time.sleep(600)\n"


@pytest.fixture
def forked(running, tmp_path):
    """forked(source, of, ...): a fork whose main() is in `source`, and its three files."""

    def fork(source: str, of: Libraries = running, stdin: str = "", **settings: str):
        tmp_path.joinpath("little_main.py").write_text(source)
        tmp_path.joinpath("stdin").write_text(stdin)
        files = {"stdin": tmp_path.joinpath("stdin").open()}
        files |= {name: tmp_path.joinpath(name).open("w+") for name in ("stdout", "stderr")}
        main = Main("little_main", ["one", "two"], environment(settings, tmp_path))
        return of.fork(main, **files), files["stdout"], files["stderr"]

    return fork


def text_of(file, of: Fork) -> str:
    """Once there is some."""
    deadline = time.monotonic() + 120
    while not (said := Path(file.name).read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert of.pid is not None
    return said


def test_a_fork_has_its_own_environment_path_and_files(running, forked, tmp_path, monkeypatch):
    monkeypatch.setenv("THERE", "since the libraries were imported")
    settings = {"HERE": "only", "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    fork, stdout, stderr = forked(TELLS, stdin="asked", **settings)
    assert text_of(stderr, fork)
    fork.end(60)  # by itself
    assert Path(stderr.name).read_text().endswith("RuntimeError: the last word\n")
    assert json.loads(Path(stdout.name).read_text()) == {
        "arguments": ["one", "two"],
        "path": str(tmp_path),
        "environment": ["only", "since the libraries were imported"],
        "child": "only\n",
        "temporary": str(tmp_path),
        "writes_bytecode": False,
        "parent": running._process.pid,
        "group": True,
        "libraries": [True, True, False],
        "stdin": "asked",
    }
    assert "HERE" not in os.environ


def test_its_end(forked):
    fork, stdout, _ = forked(WAITS)
    assert text_of(stdout, fork) == "up\n"
    process = psutil.Process(fork.pid)
    started = time.monotonic()
    fork.end()
    assert process.status() == psutil.STATUS_ZOMBIE and time.monotonic() - started < 5


def test_what_ends_before_the_libraries_are_imported_does_nothing(forked):
    with libraries() as new:
        ended, stdout, _ = forked(WAITS, of=new)
        assert ended.pid is None
        ended.end()
        other, later, _ = forked(WAITS, of=new)
        assert text_of(later, other) == "up\n"
        other.end()
        assert Path(stdout.name).read_text() == "up\n"  # of the other: the same file


def test_engines_and_plans_are_forked_from_it(running, released_engines):
    released_engines.wait_ready()
    with planner(running):
        below = psutil.Process(running._process.pid).children()
        assert released_engines._process.pid in [process.pid for process in below]
    ours = [p for p in psutil.Process().children() if any("kvgeom" in w for w in p.cmdline())]
    assert ours == [psutil.Process(running._process.pid)]


def test_where_it_has_been_killed(tmp_path, running):
    with libraries() as killed:
        os.kill(killed._process.pid, signal.SIGKILL)
        killed._process.wait()
        ended = pytest.raises(EngineSetupError, match="parent ended; it wrote nothing")
        with session(running=killed) as engines, ended:
            engines.wait_ready()
        with planner(killed) as ask, pytest.raises(KvgeomError, match="gave no plan; its last"):
            ask(tmp_path, asked([]))
