"""`kvgeom doctor` as a user runs it, on copies of the real release and on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, linked_installation, snapshot

from kvgeom import actions, cli_show, reviewed, series
from kvgeom import tree as trees

KVGEOM = [sys.executable, "-m", "kvgeom.cli"]
POOLS = "sglang/srt/mem_cache/memory_pool.py"
AFFECTED = ["--page-size=1", "--speculative-algorithm=DFLASH", "--attention-backend=fa3"]


def kvgeom(*words, **options) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*KVGEOM, *map(str, words)], env=env, capture_output=True, text=True, **options
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with the release and its dist-info, of which one file may be replaced."""
    linked_installation(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def server(tmp_path):
    """server(site) -> the id of a process that looks like a server with that SGLang."""
    program = tmp_path / "sglang"
    program.write_text("print(flush=True)\nimport time\ntime.sleep(300)\n")
    started = []

    def start(site: Path, *words: str) -> int:
        started.append(
            subprocess.Popen(
                [sys.executable, program, "serve", *words],
                env={**os.environ, "PYTHONPATH": str(site)},
                stdout=subprocess.PIPE,
            )
        )
        started[-1].stdout.readline()
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def change(path: Path, text: str) -> None:
    """By another inode: the others are the installation's own."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_the_verdict_comes_first(site, server):
    before = snapshot(site)
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 0 and done.stderr == ""
    first, second, *rest = done.stdout.splitlines()
    assert first == "sound: SGLang 0.5.23 as released; the series is not applied"
    assert second.startswith("do: kvgeom doctor --pid N --tree ")
    text = "\n".join(rest)
    assert f"SGLang 0.5.23 in {site / 'sglang'}" in text and "req-rows" in text
    assert "torch " in text and "sglang-kernel " in text

    pid = server(site, *AFFECTED)
    done = kvgeom("doctor", "--pid", pid)
    assert done.returncode == 1
    first, second, _, third, *_ = done.stdout.splitlines()
    assert first == ("affected: on SGLang 0.5.23, by what req-rows and attention-tables would fix")
    assert second == f"do: kvgeom apply --tree {site / 'sglang'}; then restart the server"
    assert third.startswith(f"Server: process {pid}: dcp 1, page 1, DFLASH ?/?/?")
    assert "writes 8 entries into the next request's row" in done.stdout
    assert snapshot(site) == before


def test_after_an_apply_the_server_is_to_be_restarted(site, server):
    old = server(site, *AFFECTED)
    command = kvgeom("doctor", "--pid", old).stdout.splitlines()[1]
    words = command.removeprefix("do: kvgeom ").partition(";")[0].split()
    assert kvgeom(*words).returncode == 0
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 0
    assert done.stdout.startswith("sound: SGLang 0.5.23 with the series applied\n")
    done = kvgeom("doctor", "--pid", old)
    assert done.returncode == 1
    assert "the series was applied after the server started\ndo: restart" in done.stdout
    done = kvgeom("doctor", "--pid", server(site, *AFFECTED))
    assert done.returncode == 0
    assert done.stdout.startswith("not affected: on SGLang 0.5.23, the series is applied\n")


def test_a_server_that_no_fault_reaches(site, server):
    done = kvgeom("doctor", "--pid", server(site, "--dcp-size", "8"))
    assert done.returncode == 0 and done.stdout.startswith("not affected: ")
    assert "\ndo: " not in done.stdout


def test_files_that_somebody_changed(site):
    other = site / "sglang/srt/constants.py"
    change(other, other.read_text() + "# ours\n")
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 0
    assert "1 files: python/sglang/srt/constants.py" in done.stdout
    change(site / POOLS, (site / POOLS).read_text().replace("class KVCache(", "class KVCache2("))
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 1
    assert done.stdout.startswith("needs attention: this SGLang 0.5.23 is not as released where")
    assert "do: kvgeom status --tree " in done.stdout and "does not fit: " in done.stdout


def test_an_applied_series_that_somebody_changed_or_upgraded(site):
    assert kvgeom("apply", "--tree", site).returncode == 0
    own = (site / POOLS).read_text()
    change(site / POOLS, "x = 1\n")
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 1 and "applied, then changed by somebody else" in done.stdout
    change(site / POOLS, own)
    info = next(site.glob("sglang-*.dist-info"))
    info = info.rename(site / "sglang-0.5.22.dist-info")
    change(info / "METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 1
    assert "applied to another release, then SGLang was replaced" in done.stdout.splitlines()[0]


def test_a_release_that_nobody_reviewed(site):
    info = next(site.glob("sglang-*.dist-info")).rename(site / "sglang-0.5.99.dist-info")
    change(info / "METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    done = kvgeom("doctor", "--tree", site)
    assert done.returncode == 1
    assert done.stdout.startswith("not known: SGLang 0.5.99 is no release that the series was")
    assert f"do: kvgeom lock --tree {site / 'sglang'}" in done.stdout


@pytest.mark.parametrize("applied", [False, True])
def test_the_quick_status_is_the_planned_one(site, applied):
    if applied:
        assert kvgeom("apply", "--tree", site).returncode == 0
    stack, tree = series.load(), trees.find(site)
    changed = reviewed.changed_files(tree)
    quick, planned = reviewed.status(stack, tree, changed), actions.status(stack, tree)
    assert changed == []
    assert cli_show.status_lines(quick, []) == cli_show.status_lines(planned, [])


def test_json(site, server):
    done = kvgeom("doctor", "--json", "--pid", server(site, *AFFECTED))
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["affected"] is True
    assert [f["pr"] for f in found["findings"]] == ["req-rows", "attention-tables"]
    assert found["release"] == "0.5.23" and found["do"].startswith("kvgeom apply")
    assert found["packages"]["torch"] and found["not_as_released"] == []


@pytest.mark.parametrize(
    "words, said",
    [
        (["--pid", "1", "--log", "x"], "--pid and --log exclude each other"),
        (["--pid", "0"], "--pid"),
        (["--log", "none"], "--log none cannot be read: No such file"),
        (["--pid", str(os.getpid())], "is no SGLang server"),
        (["--tree", "none"], "--tree none: there is no such folder"),
    ],
)
def test_wrong_arguments(words, said):
    done = kvgeom("doctor", *words)
    assert done.returncode == 2 and done.stdout == "" and said in done.stderr


def test_a_server_of_another_user(site, server, tmp_path):
    """Its arguments are there for all to read; its environment, and so its SGLang, is not."""
    pid = server(site, *AFFECTED)
    # The other user has to find this Python and this package.
    program = (
        "import sys\nfrom kvgeom import launch, running\n"
        "import os\nos.setgid(65534) if os.getuid() == 0 else None\n"
        "os.setuid(65534) if os.getuid() == 0 else None\n"
        f"pid = {pid} if os.getuid() == 65534 else 1\n"
        "print(running.sglang_folder(pid))\n"
        f"print(launch.from_process({pid}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stdout.startswith("None\ndcp 1, page 1, DFLASH"), done.stderr


def test_nothing_of_sglang_is_imported(site, server):
    pid = server(site, *AFFECTED)
    program = (
        "import sys\nfrom kvgeom.cli import main\n"
        f"sys.argv = ['kvgeom', 'doctor', '--pid', '{pid}']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code)\n"
        "print({'torch', 'sglang', 'transformers'} & {*sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stdout.endswith("\n1\nset()\n"), done.stderr


LOGGED = """
import logging, sys
logging.basicConfig(level="INFO", format="[%(asctime)s] %(message)s")
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import prepare_server_args
arguments = prepare_server_args(sys.argv[1:])
arguments.resolve_once()
engine.logger.info(f"server_args={engine._server_args_for_logging(arguments)}")
"""


def test_the_log_of_the_release(tmp_path):
    """The line as the release writes it, of arguments that it has resolved itself."""
    from kvgeom.cpu_engine import gates, models

    target, draft = models.target_and_draft("mqa", "cpu", "STANDALONE")
    words = f"--model-path {target} --device cpu --page-size 1 --attention-backend triton "
    words += f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft}"
    done = subprocess.run(
        [sys.executable, "-c", LOGGED, *words.split()],
        env={**os.environ, **gates.ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    log = tmp_path / "server.log"
    log.write_text(done.stderr)
    done = kvgeom("doctor", "--log", log)
    assert done.returncode == 1
    # What nobody gave, SGLang chose: its sizes for Llama.
    assert "dcp 1, page 1, EAGLE3 5/4/8" in done.stdout
    assert done.stdout.startswith("affected: ") and "writes 24 entries" in done.stdout
