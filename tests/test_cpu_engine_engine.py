"""SGLang's own engine on the CPU: what it serves, what it is built of, and how it ends.

The load of the default specs fills the allocator.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_fixtures import report_of

from kvgeom.cpu_engine import EngineReport, EngineSetupError, EngineSpec, Session, run

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0
# On four ranks, what `kvgeom boot` runs on eight: the pages of the allocator are as wide.
SHARDED = {
    pair: {"pair": pair, "tp": 4, "dcp": 4, "page": page}
    for pair, page in [("mqa", 8), ("mla", 64)]
}
TREE = EngineSpec(tp=1, dcp=1, steps=5, topk=4, draft_tokens=8, page=1)


def no_assertion() -> tuple[str, ...]:
    """The fault that removes the boot assertion, where the installed SGLang has it."""
    package = Path(importlib.util.find_spec("sglang").origin).parent
    applied = (package / "srt/configurator/page_geometry_check.py").exists()
    return ("no-assertion",) if applied else ()


def folders_of_engines(engines: Session) -> list[Path]:
    """One for each engine that runs."""
    scratch = engines._scratch.parent
    assert len(list(scratch.glob("kvgeom-*"))) == 1
    return list(scratch.glob("kvgeom-*/engine-*"))


@pytest.fixture(scope="module")
def report(released_engines):
    """report(**spec) -> its report."""

    def of(**spec) -> EngineReport:
        result = report_of(released_engines, EngineSpec(**spec))
        assert folders_of_engines(released_engines) == []
        return result

    return of


def assert_same_output(one: EngineReport, other: EngineReport) -> None:
    assert (one.error, other.error) == (None, None)
    assert one.outputs == other.outputs and all(one.outputs)
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("pair", ["mqa", "mla"])
def test_dcp_serves_what_one_rank_serves(report, pair):
    sharded = report(**SHARDED[pair], bounds=True)
    assert_same_output(sharded, report(pair=pair, tp=1, dcp=1))
    assert sharded.peak_token_usage >= 0.97
    assert sharded.violations == []
    assert [len(out) for out in sharded.outputs] == [sharded.spec.max_new_tokens] * 2
    assert sharded.peak_rss_mb < 10_000


def test_mqa_drafts_are_accepted_and_rejected(report):
    accepted = report(**SHARDED["mqa"], bounds=True).accept_lengths
    assert all(1 < length < 4 for length in accepted)
    assert accepted == report(pair="mqa", tp=1, dcp=1).accept_lengths


@pytest.mark.parametrize(
    ("pair", "page", "locs", "target"),
    [("mqa", 8, 256, "MHATokenToKVPool"), ("mla", 64, 768, "MLATokenToKVPool")],
)
def test_geometry_of_every_rank(report, pair, page, locs, target):
    ranks = report(**SHARDED[pair], bounds=True).geometry
    assert [(g.rank, g.dcp_rank, g.dcp_size) for g in ranks] == [(r, r, 4) for r in range(4)]
    for g in ranks:
        assert (g.allocator.size, g.allocator.page_size) == (locs, 4 * page)
        assert g.target.cls == target
        assert (g.target.size, g.target.page_size, g.target.rows) == (
            locs // 4,
            page,
            locs // 4 + page,
        )
        assert (g.target.indexed, g.target.dcp_size) == ("translated", 4)
        assert (g.draft.size, g.draft.page_size, g.draft.rows) == (locs, 4 * page, locs + 4 * page)
        assert (g.draft.indexed, g.draft.dcp_size) == ("raw", 1)
        assert g.draft_shares_allocator
        assert g.req_to_token.width > g.req_to_token.context_len


def test_without_a_draft_the_tokens_are_the_same(report):
    plain = report(pair="mqa", draft=False)
    assert_same_output(plain, report(pair="mqa", tp=1, dcp=1))
    assert plain.geometry[0].draft is None
    assert_same_output(plain, report(pair="mqa", draft=False, tp=2, dcp=1))


def to_the_end(*faults: str) -> dict:
    """Four ranks, 8 pages of 32, and a prompt that ends 3 rows past a draft pool paged by 8."""
    length = 256 - 32 + 8 + 3
    return {
        "tp": 4,
        "dcp": 4,
        "page": 8,
        "bounds": True,
        "faults": faults,
        "prompts": (tuple(3 + 7 * i % 120 for i in range(length)),),
        "max_new_tokens": 1,
    }


def test_bounds_mode_names_the_row_past_the_draft_pool(report):
    broken = report(**to_the_end("draft-page", *no_assertion()))
    assert (broken.error.stage, broken.error.type) == ("serve", "OutOfBoundsWrite")
    assert broken.geometry[0].draft.rows == 264
    assert broken.peak_token_usage >= 0.97
    for found in broken.violations:
        assert (found.structure, found.cls) == ("draft", "MHATokenToKVPool")
        assert (found.index, found.limit, found.loc, found.allocator_page) == (264, 264, 264, 8)
        assert f"rank {found.rank}: draft pool" in found.message
    assert broken.violations
    assert broken.error.message in [v.message for v in broken.violations]


def test_without_bounds_mode_such_a_write_goes_on(report):
    """As on a GPU, where nothing stops it; the guard rows behind the pool take it."""
    broken = report(**SHARDED["mqa"], faults=("draft-page", *no_assertion()))
    assert broken.geometry[0].draft.rows == 264
    assert_same_output(broken, report(**SHARDED["mqa"], bounds=True))


def test_the_assertion_can_only_be_removed_where_it_is(report):
    if no_assertion():
        pytest.skip("the installed SGLang has the series applied")
    refused = report(tp=2, dcp=2, faults=("no-assertion",))
    assert (refused.error.stage, refused.error.type) == ("boot", "EngineSetupError")
    assert "is the series applied?" in refused.error.message
    assert refused.error.rank in (0, 1)


def test_a_tree_of_drafts_gives_the_tokens_of_no_draft(report):
    load = {"prompts": ((5, 6, 7, 8), tuple(range(9, 40))), "max_new_tokens": 10}
    tree = report(**vars_of(replace(TREE, **load)))
    plain = report(tp=1, dcp=1, page=1, draft=False, **load)
    assert_same_output(tree, plain)
    assert max(tree.accept_lengths) > 2


def vars_of(spec: EngineSpec) -> dict:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_bounds_mode_names_the_neighbour_of_an_overlong_row(report):
    """Page 1, a tree of drafts, a request near the context limit: the row is too narrow."""
    spec = replace(TREE, context=48, bounds=True, prompts=((5, 6, 7, 8), (9,)), max_new_tokens=43)
    broken = report(**vars_of(spec))
    assert broken.error.type == "OutOfBoundsWrite"
    found = broken.violations[0]
    width = broken.geometry[0].req_to_token.width
    assert (found.structure, found.limit) == ("req_to_token", width)
    assert found.end > width >= found.start
    assert found.index == found.row + 1
    assert f"would write into row {found.index}" in found.message


def test_reports_and_specs_survive_json(report):
    for result in (
        report(**SHARDED["mqa"], bounds=True),
        report(**to_the_end("draft-page", *no_assertion())),
    ):
        assert EngineReport.from_json(result.to_json()) == result
        assert EngineSpec.from_json(result.spec.to_json()) == result.spec


def test_a_run_that_takes_too_long_is_ended(released_engines):
    result = released_engines.run(EngineSpec(tp=2, dcp=2), timeout=0.5)
    assert (result.error.stage, result.error.type) == ("boot", "TimeoutError")
    assert folders_of_engines(released_engines) == []


def test_a_killed_rank_ends_the_run(released_engines):
    """SIGKILL to one rank while it serves: the run ends with an error, long before its timeout."""
    killed = []

    def kill_one(stage: str, detail: str) -> None:
        if stage == "serve" and not killed:
            killed.append(_ranks_below(released_engines._process.pid)[-1])
            os.kill(killed[0], signal.SIGKILL)

    result = released_engines.run(EngineSpec(tp=2, dcp=2), on_event=kill_one, timeout=TIMEOUT)
    assert killed and result.error.stage == "serve"
    assert result.outputs == [] and result.seconds < TIMEOUT / 2
    assert _ranks_below(released_engines._process.pid) == []
    assert folders_of_engines(released_engines) == []


def _ranks_below(pid: int) -> list[int]:
    below = psutil.Process(pid).children(recursive=True)
    return [p.pid for p in below if "scheduler" in " ".join(p.cmdline())]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_caller(tmp_path, ending):
    """The command is interrupted or killed while it serves; all its processes go, and its files."""
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"tp": 2, "dcp": 2}))
    folder = tmp_path / ("scratch" * 12)  # a socket's path in it would be too long
    folder.mkdir()
    caller = subprocess.Popen(
        [sys.executable, "-m", "kvgeom.cpu_engine", str(spec)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it runs in the background with this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with caller:
        said = []
        for line in caller.stderr:
            said.append(line)
            if line.startswith("serve:"):
                break
        assert said and said[-1].startswith("serve:"), "".join(said)
        below = psutil.Process(caller.pid).children(recursive=True)
        assert len(below) >= 4  # parent, engine, two ranks
        caller.send_signal(ending)
        caller.wait(60)
    assert caller.returncode == (130 if ending == signal.SIGINT else -signal.SIGKILL)
    _, left = psutil.wait_procs(below, timeout=30)
    assert left == []
    assert list(folder.iterdir()) == []


def test_no_shared_memory_is_left(released_engines):
    before = set(Path("/dev/shm").iterdir())
    assert released_engines.run(EngineSpec(tp=2, dcp=2), timeout=TIMEOUT).ok
    ours = {p for p in set(Path("/dev/shm").iterdir()) - before if p.name.startswith("sgl")}
    assert ours == set()


def test_an_unknown_release_is_refused(tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "_version.py").write_text("__version__ = '0.5.99'\n")
    with pytest.raises(EngineSetupError, match=r"knows SGLang 0\.5\.23, this tree is 0\.5\.99"):
        run(EngineSpec(), tree=tmp_path)


def test_a_tree_without_sglang_is_refused(tmp_path):
    with pytest.raises(EngineSetupError, match="no sglang package in"):
        run(EngineSpec(), tree=tmp_path)


def test_on_cuda_nothing_is_stood_in_for():
    """No device here: SGLang itself says so, from a process that was started and not forked."""
    refused = run(EngineSpec(tp=1, dcp=1, draft=False, device="cuda"), timeout=TIMEOUT)
    assert refused.geometry == [] and refused.outputs == []
    assert refused.error.stage == "boot" and refused.error.type != "EngineSetupError"
    assert re.search("cuda|gpu|device", refused.error.message, re.IGNORECASE), refused.error
