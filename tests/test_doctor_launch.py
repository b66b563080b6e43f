"""What `kvgeom doctor` reads of a server: its real process, or the text of its log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvgeom import launch, running
from kvgeom.errors import KvgeomError

SLEEP = "import time\ntime.sleep(120)\n"


@pytest.fixture
def start(tmp_path):
    """start(*words, env=...) -> the id of a real process `python .../sglang *words`."""
    program = tmp_path / "bin" / "sglang"
    program.parent.mkdir()
    program.write_text(SLEEP)
    running_now = []

    def call(*words: str, **options) -> int:
        process = subprocess.Popen([sys.executable, str(program), *words], **options)
        running_now.append(process)
        deadline = time.monotonic() + 10  # between fork and exec it has this test's arguments
        while str(program).encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process.pid

    yield call
    for process in running_now:
        process.kill()
        process.wait()


def refusal(function, *arguments) -> str:
    with pytest.raises(KvgeomError) as caught:
        function(*arguments)
    assert caught.value.exit_code == 2 and caught.value.way_out
    return str(caught.value)


def test_the_arguments_of_a_process(start):
    pid = start(
        "serve", "--model-path", "m", "--dcp-size", "8", "--page-size=64", "--enable-hicache",
        "--speculative-algorithm", "dspark", "--speculative-num-draft-tokens", "8",
        "--context-length", "128Ki", "--attention-backend", "fa3",
        "--speculative-draft-attention-backend", "triton",
    )  # fmt: skip
    found = launch.from_process(pid)
    assert (found.dcp, found.page, found.context, found.hicache) == (8, 64, 131072, True)
    assert (found.algorithm, found.draft_tokens, found.steps) == ("DSPARK", 8, None)
    assert found.backends == ("fa3", "triton") and not found.unified
    assert found.source == f"process {pid}"


@pytest.mark.parametrize("spelling", ["--decode-context-parallel-size", "--dcp-size", "--dcp-s"])
def test_other_spellings_and_beginnings(spelling):
    assert launch.from_arguments([spelling, "4"], "x").dcp == 4
    assert launch.from_arguments([f"{spelling}=4"], "x").dcp == 4


def test_arguments_that_only_look_alike():
    words = ["--speculative", "EAGLE", "--page-size-hint", "9", "page-size", "5", "--"]
    found = launch.from_arguments(words, "x")
    assert (found.algorithm, found.page) == (None, None)


def test_options_in_a_config_file_are_mentioned():
    assert launch.from_arguments(["--dcp-size", "2"], "x").notes == ()
    assert "--config" in launch.from_arguments(["--config", "a.yaml"], "x").notes[0]


def test_a_value_that_is_no_number():
    assert "page_size is 'wide'" in refusal(launch.from_arguments, ["--page-size", "wide"], "x")


def test_the_server_can_be_a_module():
    words = [sys.executable, "-c", SLEEP, "-m", "sglang.launch_server", "--dcp-size", "2"]
    with subprocess.Popen(words) as process:
        time.sleep(0.2)
        found = launch.from_process(process.pid)
        process.kill()
    assert found.dcp == 2


@pytest.mark.parametrize(
    "line, arguments",
    [
        ("sglang serve --tp-size 8", ["--tp-size", "8"]),
        ("X=1 /usr/bin/sglang serve", []),
        ("python3 -m sglang.launch_server --dcp-size 8", ["--dcp-size", "8"]),
        ("--model-path serve --served-model-name sglang", None),
    ],
)
def test_a_command_line_is_its_arguments(line, arguments):
    assert launch.server_arguments(line.split()) == arguments


def test_a_process_that_is_gone(start):
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert "no such process" in refusal(launch.from_process, process.pid)


def test_a_process_that_has_ended_but_is_not_reaped():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert "it ended" in refusal(launch.from_process, process.pid)
    process.wait()


def test_a_process_that_is_no_server():
    said = refusal(launch.from_process, os.getpid())
    assert "is no SGLang server" in said and "--log" in said


def test_a_part_of_a_server_names_the_server():
    """SGLang gives its schedulers a title in place of their arguments."""
    title = ["sglang::scheduler_TP0", "-c", SLEEP]
    with subprocess.Popen(title, executable=sys.executable) as process:
        time.sleep(0.2)
        said = refusal(launch.from_process, process.pid)
        process.kill()
    assert f"--pid {os.getpid()}" in said and "sglang::scheduler_TP0" in said


def test_the_sglang_of_a_process(start, little, tmp_path):
    _, tree = little
    nowhere = start("serve", env={"PATH": os.environ["PATH"]})
    by_path = start("serve", env={"PYTHONPATH": str(tree)})
    relative = start("serve", env={"PYTHONPATH": tree.name}, cwd=tree.parent)
    assert running.sglang_folder(by_path) == tree
    assert running.sglang_folder(relative) == tree
    # The interpreter of these tests has an SGLang of its own.
    site = running.sglang_folder(nowhere)
    assert site is not None and Path(sys.prefix) in site.parents
    assert abs(running.started_at(by_path) - time.time()) < 60


def test_the_sglang_of_an_interpreter_without_one(start, tmp_path):
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "venv/lib/python3.11/site-packages/sglang/srt").mkdir(parents=True)
    with subprocess.Popen([python, "-c", SLEEP], env={}) as process:
        time.sleep(0.2)
        found = running.sglang_folder(process.pid)
        process.kill()
    assert found == tmp_path / "venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "text",
    [
        "server_args={'model_path': 'm', 'dcp_size': 8, 'page_size': 64, 'context_length': None,"
        " 'speculative_algorithm': 'EAGLE3', 'speculative_num_steps': 5, 'quant': <Q.X: 'x'>,"
        " 'extra': {'page_size': 9, 'dcp_size': 9}, 'enable_hierarchical_cache': True,"
        " 'note': \"'page_size': 7, dcp_size=7\", 'attention_backend': 'fa3'}",
        "server_args=ServerArgs(model_path='m', dcp_size=8, page_size=64, context_length=None,"
        " speculative_algorithm='EAGLE3', speculative_num_steps=5, quant=<Q.X: 'x'>,"
        " extra=Other(page_size=9, dcp_size=9), enable_hierarchical_cache=True,"
        " note='page_size=7, dcp_size=7', attention_backend='fa3')",
    ],
)
def test_the_two_ways_a_log_is_written(tmp_path, text):
    log = tmp_path / "server.log"
    log.write_text(
        "[2026-01-01 00:00:00] server_args={'dcp_size': 1}\nstopped\n"
        f"[2026-01-02 00:00:00] {text}, and more'\n[2026-01-02 00:00:01] server_args is used\n"
    )
    found = launch.from_log(log)
    assert (found.dcp, found.page, found.context, found.hicache) == (8, 64, None, True)
    assert (found.algorithm, found.steps, found.topk) == ("EAGLE3", 5, None)
    assert found.backends == ("fa3",) and found.source == f"{log}, line 3"


def test_a_log_of_a_server_that_the_plugin_served(tmp_path):
    log, start = tmp_path / "server.log", "server_args={'dcp_size': 8}\n"
    served = "[2026] kvgeom: series 0 on SGLang 0.5.23: target pool 68 rows\n"
    log.write_text(start + served)
    assert launch.from_log(log).served
    log.write_text(start + served + start)
    assert not launch.from_log(log).served


@pytest.mark.parametrize("text", ["", "[2026] ready\n", "server_args is used\n", "\0\xff\n"])
def test_a_log_without_a_start(tmp_path, text):
    (tmp_path / "server.log").write_bytes(text.encode("latin-1"))
    assert "no line has `server_args=`" in refusal(launch.from_log, tmp_path / "server.log")


def test_a_log_whose_line_was_cut(tmp_path):
    (tmp_path / "server.log").write_text("server_args={'model_path': 'a")
    assert "line 1: its `server_args=` has no dcp_size" in refusal(
        launch.from_log, tmp_path / "server.log"
    )


def test_a_log_that_cannot_be_read(tmp_path):
    assert "No such file" in refusal(launch.from_log, tmp_path / "none")
    assert "Is a directory" in refusal(launch.from_log, tmp_path)
