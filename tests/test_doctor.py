"""`kvgeom doctor` as a user runs it, on copies of the real release and on real processes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, kvgeom_checkout, linked_installation, snapshot

from kvgeom import actions, cli_show, reviewed, series
from kvgeom import tree as trees

KVGEOM = [sys.executable, "-m", "kvgeom.cli"]
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
    assert "the series was applied after the server started\ndo: restart the server\n" in (
        done.stdout
    )
    done = kvgeom("doctor", "--pid", server(site, *AFFECTED))
    assert done.returncode == 0
    assert done.stdout.startswith("not affected: on SGLang 0.5.23, the series is applied\n")


def test_a_server_that_no_fault_reaches(server):
    words = ["--dcp-size", "8", "--attention-backend", "cutedsl_mla"]
    done = kvgeom("doctor", "--pid", server(Path(sys.prefix), *words))
    assert done.returncode == 0 and done.stdout.startswith("not affected: ")
    assert "\ndo: " not in done.stdout


@pytest.fixture
def little_doctor(little, tmp_path):
    """little_doctor(verb) -> a command's end, on a little series and an SGLang with a RECORD."""
    stack, root = little
    record = []
    for file in sorted((root / "sglang").rglob("*.py")):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest())
        record.append(f"{file.relative_to(root)},sha256={digest.decode().rstrip('=')},1")
    record += ["../../../bin/sglang,sha256=x,1", "sglang-0.5.23.dist-info/RECORD,,"]
    (root / "sglang-0.5.23.dist-info/RECORD").write_text("\n".join(record) + "\n")
    command = kvgeom_checkout(tmp_path / "checkout", stack.root)

    def call(verb: str = "doctor") -> subprocess.CompletedProcess:
        done = subprocess.run(
            [*command, verb, "--tree", root], capture_output=True, text=True, cwd=tmp_path
        )
        assert "Traceback" not in done.stderr
        return done

    call.root, call.rows = root, root / "sglang/srt/mem_cache/rows.py"
    return call


def test_files_that_somebody_changed(little_doctor):
    assert "not as SGLang released it" not in little_doctor().stdout
    (little_doctor.root / "sglang/srt/__init__.py").write_text("# ours\n")
    done = little_doctor()
    assert done.returncode == 0
    assert "not as SGLang released it: 1 files: python/sglang/srt/__init__.py" in done.stdout
    own = little_doctor.rows.read_text()
    little_doctor.rows.write_text(own.replace("n + 4", "n + 5"))
    done = little_doctor()
    assert done.returncode == 1
    assert done.stdout.startswith("needs attention: this SGLang 0.5.23 is not as released where")
    assert "do: kvgeom status --tree " in done.stdout and "does not fit: " in done.stdout
    assert "2 files: python/sglang/srt/__init__.py, python/sglang/srt/mem_cache/rows.py" in (
        done.stdout
    )


def test_a_change_beside_the_edits_of_an_edited_file(little_doctor):
    little_doctor.rows.write_text(little_doctor.rows.read_text() + "# ours\n")
    for state in ("as released; the series is not applied", "with the series applied"):
        done = little_doctor()
        assert done.returncode == 0 and done.stdout.startswith("sound: SGLang 0.5.23 " + state)
        assert "1 files: python/sglang/srt/mem_cache/rows.py" in done.stdout
        little_doctor("apply")


def upgrade(root: Path, release: str) -> None:
    info = next(root.glob("sglang-*.dist-info"))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")


def test_an_applied_series_that_somebody_changed_or_upgraded(little_doctor):
    own = little_doctor.rows.read_text()
    assert little_doctor("apply").returncode == 0
    patched = little_doctor.rows.read_text()
    for text, state, command in (
        ("x = 1\n", "applied, then changed by somebody else", "revert"),
        (own, "applied, then SGLang was reinstalled over it", "apply"),
    ):
        little_doctor.rows.write_text(text)
        done = little_doctor()
        assert done.returncode == 1 and state in done.stdout.splitlines()[0]
        assert done.stdout.splitlines()[1].startswith(f"do: kvgeom {command} --tree ")
    little_doctor.rows.write_text(patched)
    upgrade(little_doctor.root, "0.5.24")
    done = little_doctor()
    assert done.returncode == 1
    assert done.stdout.startswith("not known: SGLang 0.5.24 is no release that the series was")
    assert "Series: applied to another release, then SGLang was replaced" in done.stdout


def test_a_release_that_nobody_reviewed(little_doctor):
    upgrade(little_doctor.root, "0.5.99")
    done = little_doctor()
    assert done.returncode == 1
    assert done.stdout.startswith("not known: SGLang 0.5.99 is no release that the series was")
    assert f"do: kvgeom lock --tree {little_doctor.root / 'sglang'}" in done.stdout


def test_the_quick_status_is_the_planned_one(site):
    stack, tree = series.load(), trees.find(site)
    for apply in (False, True):
        if apply:
            assert kvgeom("apply", "--tree", site).returncode == 0
        changed = reviewed.changed_files(tree)
        assert changed == []
        quick, planned = reviewed.status(stack, tree, changed), actions.status(stack, tree)
        assert cli_show.status_lines(quick, []) == cli_show.status_lines(planned, [])


def test_json(server):
    done = kvgeom("doctor", "--json", "--pid", server(Path(sys.prefix), *AFFECTED))
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


def test_a_server_of_another_user(server):
    """Its arguments are there for all to read; its environment, and so its SGLang, is not."""
    pid = server(Path(sys.prefix), *AFFECTED)
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


def test_nothing_of_sglang_is_imported(server):
    pid = server(Path(sys.prefix), *AFFECTED)
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
