"""`kvgeom releases`: wheels fetched by pip from an index of ours."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import test_tree_kill
from conftest import REPOSITORY
from filelock import FileLock
from little_index import (  # noqa: F401
    OWN,
    content,
    fetch,
    index,
    make_wheel,
    no_index,
    refused,
    run,
)

from kvgeom import releases, tree
from kvgeom.errors import KvgeomError


def test_fetched_once(index, no_index):
    done = run("0.5.22", "0.5.23")
    base = releases.cache()
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"sglang==0.5.22  fetched  {base}/0.5.22",
        f"sglang==0.5.23  fetched  {base}/0.5.23",
    ]
    assert "sglang==0.5.23: unpacking: sglang-0.5.23-py3-none-any.whl" in done.stderr
    assert (releases.tree("0.5.23") / "sglang/srt/pool.py").read_bytes() == b"rows = 4\n"
    assert str(tree.find(releases.tree("0.5.22")).release) == "0.5.22"
    before, inode = content(), releases.tree("0.5.23").stat().st_ino
    no_index()
    done = run("0.5.23")
    assert done.stdout == f"sglang==0.5.23  in place  {base}/0.5.23\n"
    assert content() == before and releases.tree("0.5.23").stat().st_ino == inode


def test_the_wheel_is_kept_with_its_checksum(index):
    fetch("0.5.23")
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=releases.tree("0.5.23") / ".wheel")
    assert sums.returncode == 0


def test_json(index):
    done = run("--json", "0.5.17")
    found = json.loads(done.stdout)
    assert found["cache"] == str(releases.cache())
    assert [p["package"] for p in found["packages"]] == ["sglang", "transformers", "tokenizers"]
    wheel = index / found["packages"][0]["wheel"]
    assert found["packages"][0]["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert found["pythonpath"] == {"0.5.17": [str(p) for p in releases.import_path("0.5.17")]}


def test_the_older_packages_come_along_and_import_first(index):
    assert fetch("0.5.17", "0.5.23") == ["fetched"] * 4
    assert len(releases.import_path("0.5.23")) == 1
    path = os.pathsep.join(map(str, releases.import_path("0.5.17")))
    program = "import sglang.srt.pool as p, transformers as t; print(p.__file__, t.old)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{releases.tree('0.5.17')}/sglang/srt/pool.py True\n", done.stderr
    assert fetch("0.5.17") == ["in place"] * 3  # what Python compiled does not count
    shutil.rmtree(releases.import_path("0.5.17")[2])
    with pytest.raises(KvgeomError, match="with-tokenizers-0.22.2 is missing"):
        releases.import_path("0.5.17")


def test_a_release_that_was_not_fetched(index):
    with pytest.raises(KvgeomError, match="SGLang 0.5.23 is not complete") as caught:
        releases.tree("0.5.23")
    assert caught.value.way_out == "`kvgeom releases 0.5.23` fetches it"


def spoil(path: Path, how: str) -> None:
    if how == "change":
        path.write_bytes(path.read_bytes()[:-2] + b"x\n")
    elif how == "remove":
        path.unlink()
    else:
        path.with_name("more.py").write_bytes(b"")


SRT, INFO, KEPT = "sglang/srt/pool.py", "sglang-0.5.23.dist-info", ".wheel"


@pytest.mark.parametrize(
    "path, how, said, offline",
    [
        (SRT, "change", f"{SRT} has other bytes than its RECORD says", True),
        (SRT, "remove", f"{SRT} is missing", True),
        (SRT, "add", "sglang/srt/more.py is not of the wheel", True),
        (f"{INFO}/METADATA", "change", "METADATA has other bytes", True),
        (f"{INFO}/RECORD", "remove", "its RECORD is missing", True),
        (f"{INFO}/RECORD", "change", "RECORD is missing or cannot be read", True),
        (f"{KEPT}/sglang-0.5.23-py3-none-any.whl", "change", "not as it was fetched", False),
        (f"{KEPT}/sglang-0.5.23-py3-none-any.whl", "remove", "not as it was fetched", False),
        (f"{KEPT}/SHA256SUMS", "remove", "not as it was fetched", False),
    ],
)
def test_what_was_changed_is_repaired(index, no_index, path, how, said, offline):
    fetch("0.5.23")
    before = content()
    spoil(releases.tree("0.5.23") / path, how)
    assert content() != before
    if offline:
        no_index()
    told = []
    assert [str(f.result) for f in releases.fetch(["0.5.23"], told.append)] == ["repaired"]
    assert any("repairing: " in t and said in t for t in told), told
    assert content() == before


def test_what_cannot_be_repaired_stays(index, no_index):
    fetch("0.5.23")
    spoil(releases.tree("0.5.23") / KEPT / "SHA256SUMS", "remove")
    before = content()
    no_index()
    assert run("0.5.23").returncode == 1
    assert content() == before


@pytest.mark.parametrize("how", ["lie", "truncated", "changed"])
def test_a_damaged_wheel_is_refused(index, how):
    wheel = make_wheel(index, "sglang", "0.5.23", OWN, lie=SRT if how == "lie" else "")
    if how == "truncated":
        wheel.write_bytes(wheel.read_bytes()[:-40])
    if how == "changed":
        wheel.write_bytes(wheel.read_bytes().replace(b"rows = 4", b"rows = 5"))
    done = run("0.5.22", "0.5.23")
    assert done.returncode == 1 and "sglang-0.5.23-py3-none-any.whl" in done.stderr
    assert {k.split("/")[0] for k in content()} == {"0.5.22"}  # what is finished stays


def test_wrong_arguments(index):
    refused(run("newest"), 2, "'newest' is not a release number")
    refused(run("--table", "0.5.23"), 2, "--table shows all supported releases")
    assert run("--tabel").returncode == 2


def test_an_unknown_release(index):
    refused(run("9.9.9"), 1, "no wheel of sglang==9.9.9", "index versions sglang")


def test_no_network(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    refused(run("9.9.9"), 1, "an index that it is set up for does not answer", "`pip config list`")


def test_pip_is_missing(index, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KvgeomError, match="pip is not installed for .*, and it downloads sglang"):
        fetch("0.5.23")
    assert content() == {}


def test_pip_refuses(index, monkeypatch):
    monkeypatch.setenv("PIP_TIMEOUT", "soon")
    refused(run("0.5.23"), 1, "pip could not fetch sglang==0.5.23: ", "tells more")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_disk_that_is_full(index, compression):
    """No file may be longer: pip cannot write the wheel, or the wheel cannot be unpacked."""
    files, limit = {**OWN, "sglang/big.py": b"x = 1\n" * 50_000}, 100_000
    make_wheel(index, "sglang", "0.5.23", files, compression=compression)
    done = run(
        "0.5.23", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    refused(done, 1, "File too large", "sglang==0.5.23 is not fetched", "free 200 MB")


def test_a_cache_that_cannot_be_written(index, tmp_path):
    (tmp_path / "xdg").write_text("a file in the way")
    refused(run("0.5.23"), 1, "sglang==0.5.23 is not fetched", "set XDG_CACHE_HOME")


@pytest.fixture
def stalled(index, monkeypatch):
    """Starts `kvgeom releases` on an index that never answers; (process, pip's connection)."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(60)
    started = []

    def start() -> tuple[subprocess.Popen, socket.socket]:
        monkeypatch.delenv("PIP_NO_INDEX")
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        monkeypatch.setenv("PIP_INDEX_URL", url)
        command = [sys.executable, "-m", "kvgeom.cli", "releases", "0.5.23"]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell starts what it runs in the background with this signal ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started.append(process)
        connection, _ = server.accept()
        connection.settimeout(60)
        return process, connection

    yield start
    server.close()
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_while_pip_downloads(stalled):
    process, connection = stalled()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said[1]
    while connection.recv(4096):  # pip is gone too
        pass
    assert content() == {}


def test_a_kill_while_pip_downloads(stalled, monkeypatch):
    process, connection = stalled()
    process.kill()
    process.communicate()
    assert [k for k in content() if not k.startswith(".new-")] == []
    connection.close()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch("0.5.23") == ["fetched"]
    assert {k.split("/")[0] for k in content()} == {"0.5.23"}


def test_a_kill_at_every_step(index, monkeypatch):
    """While a changed file is repaired: what is there is whole, or as changed, or gone."""
    monkeypatch.setattr(test_tree_kill, "STEPS", ("mkdir", "rename", "unlink", "rmdir", "open"))
    fetch("0.5.23")
    whole, spoilt, seen, step = content(), None, set(), 0
    while True:
        step += 1
        spoil(releases.tree("0.5.23") / SRT, "change")
        spoilt = content()
        killed = test_tree_kill.killed_at(step, lambda: fetch("0.5.23"))
        left = {k: v for k, v in content().items() if not k.startswith(".new-")}
        assert left in (whole, spoilt, {})
        seen.add("whole" if left == whole else "spoilt" if left else "gone")
        fetch("0.5.23")
        assert content() == whole
        if not killed:
            break
    assert seen == {"whole", "spoilt", "gone"} and step > 8


def test_two_at_once(index):
    with FileLock(releases.cache() / ".lock"):
        command = [sys.executable, "-m", "kvgeom.cli", "releases", "0.5.23"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both = [subprocess.Popen(command, cwd=REPOSITORY, **pipes) for _ in range(2)]
        for process in both:
            line = process.stderr.readline()
            assert line == "sglang==0.5.23: waiting for another kvgeom: up to 600 s\n"
        assert content() == {}
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(text.split("  ")[1] for text in said) == ["fetched", "in place"]


def test_one_that_never_ends(index, monkeypatch):
    monkeypatch.setattr(releases, "_WAIT_S", 0.3)
    releases.cache().mkdir(parents=True)
    with (
        FileLock(releases.cache() / ".lock"),
        pytest.raises(KvgeomError, match="another kvgeom has been fetching"),
    ):
        fetch("0.5.23")
