"""What `kvgeom boot` prints and writes, and what it says to wrong arguments."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from boot_reports import rank, report
from conftest import make_tree
from rich.console import Console

from kvgeom import boot_checks, boot_json, boot_show, boot_specs

# what is printed and written


def printed(function, *args) -> str:
    out = io.StringIO()
    function(Console(file=out, width=120, highlight=False), *args)
    return out.getvalue()


def test_the_printed_table():
    text = printed(boot_show.show_geometry, report())
    assert "translated (loc // 8)" in text and "All 8 ranks have these figures." in text
    ranks = [rank(n) for n in range(8)]
    ranks[6] = rank(6, draft_rows=260)
    text = printed(boot_show.show_geometry, report(geometry=ranks))
    assert "rank 6: draft.rows is 260, elsewhere 288" in text and "All 8" not in text


def test_the_summary_has_a_line_per_claim():
    claims = [
        boot_checks.Claim("serve", True, "x" * 200),
        boot_checks.Claim("refuse", False, "[a]"),
    ]
    lines = printed(boot_show.show_summary, claims).splitlines()
    assert lines == [f"ok      serve   {'x' * 200}", "FAILED  refuse  [a]"]


def test_plain_steps_are_lines():
    out = io.StringIO()
    with boot_show.Steps(Console(file=out, width=80), ["copy", "patched"]) as steps:
        with steps.step("copy") as on_event:
            on_event("copy", "SGLang")
        with steps.step("patched") as on_event:
            on_event("serve", "1/8 tokens")
            on_event("serve", "2/8 tokens")
    assert out.getvalue().splitlines() == ["copy: SGLang", "patched: serve: 1/8 tokens"]


def test_json_replaces_the_file_at_once(tmp_path):
    target = tmp_path / "result.json"
    target.write_text("old")
    boot_json.write(target, json.dumps({"ok": True}))
    assert json.loads(target.read_text()) == {"ok": True}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


# the runs


def test_runs_of_a_step():
    specs = boot_specs.engine_specs("mqa", 8, 4)
    patched, control = specs["patched"], specs["control"]
    assert patched.page * patched.dcp == 32 and patched.max_total_tokens * patched.dcp == 256
    assert (control.tp, control.dcp, control.prompts) == (1, 1, patched.prompts)
    assert specs["refuse"] == replace(patched, faults=("draft-page",))
    assert specs["overrun"].faults == ("draft-page", "no-assertion") and specs["overrun"].bounds


def kvgeom(*args: str, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvgeom.cli", "boot", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.parametrize(
    "args, sentence",
    [
        (["--tp", "3"], "--tp 3 --dcp 8: the pairs run with tp and dcp 4 or 8"),
        (["--tp", "4"], "--tp 4 --dcp 8: the pairs run with tp and dcp 4 or 8"),
        (["--dcp", "1"], "--tp 8 --dcp 1: the pairs run with tp and dcp 4 or 8"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder /nowhere"),
        (["--json", "/dev/null"], "--json /dev/null: is not an ordinary file"),
        (["--tree", "/nowhere"], "--tree /nowhere: there is no such folder"),
        (["--step", "rows-of-nothing"], "rows-of-nothing"),
    ],
)
def test_wrong_arguments(args, sentence):
    done = kvgeom(*args)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and "Traceback" not in done.stderr


def test_devices_are_counted():
    done = kvgeom("--device", "cuda", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert "--device cuda needs 8 CUDA devices, one a rank, and 0 were found" in done.stderr


def test_a_release_that_the_engine_does_not_know(tmp_path):
    make_tree(tmp_path / "site", release="0.5.99")
    done = kvgeom("--tree", str(tmp_path / "site"))
    assert done.returncode == 1 and done.stdout == ""
    assert "the CPU engine knows SGLang 0.5.23, this tree is 0.5.99" in done.stderr
