"""SGLang's own rules, on everything of ours that goes into its tree: the new files, the tests, and
the code inside the edits. Its CI registration is checked with its own parser."""

from __future__ import annotations

import functools
import importlib.util
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path

import pytest

from kvgeom import install, plan, series, tree

STACK = series.load()
NEW = {f: STACK.root / f for pr in STACK.prs for f in pr.files}
TESTS = {f: p for f, p in NEW.items() if f.startswith("test/")}
EDITS = {f"{e.file} {e.id}": e for pr in STACK.prs for e in pr.edits if e.code}
# black's width, which SGLang formats with; an edit's code is indented to its place.
WIDTH = 88
# SGLang's 8-GPU runners that our tests may name.
RUNNER_GPUS = {"8-gpu-h200": 8, "8-gpu-b200": 8}


def sources():
    for name, path in NEW.items():
        yield name, path.read_text("utf-8")
    for name, edit in EDITS.items():
        yield name, textwrap.dedent(edit.code)


SOURCES = dict(sources())


def comments(text: str) -> list[list[str]]:
    """Runs of comment lines that follow each other."""
    runs: list[list[str]] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            if token.start[0] != last + 1:
                runs.append([])
            runs[-1].append(token.string)
            last = token.start[0]
    return runs


@pytest.mark.parametrize("name", SOURCES)
def test_text(name):
    text = SOURCES[name]
    assert text.isascii()
    assert not re.search(r"#\d{3,}|\bPR \d|pull/\d|Args:\n|Returns:\n", text)
    assert "kvgeom" not in text
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", SOURCES)
def test_comments_are_one_or_two_lines(name):
    assert [run for run in comments(SOURCES[name]) if len(run) > 2] == []


@pytest.mark.parametrize("name", SOURCES)
def test_no_dataclasses_no_bare_asserts_on_geometry(name):
    text = SOURCES[name]
    assert "@dataclass" not in text
    assert not re.search(r"\bgetattr\(", text), "SGLang's reviewers refuse defensive getattr"


def test_the_edited_files_are_formatted_as_they_were():
    """As SGLang's formatter leaves them: of what it would change, nothing is the series'."""
    found = tree.find(None)
    read = functools.partial(install.original, found, install.read_manifest(found))
    changes = plan.make(STACK, read, found.release, writes=found.writes).changes
    worse = {
        path: now
        for path, (before, after) in changes.items()
        if before and (now := unformatted(after)) != unformatted(before)
    }
    assert worse == {}


def unformatted(text: bytes) -> list[str]:
    """The lines that `ruff format` would take out or put in, in order."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", "-"]
    done = subprocess.run(command, input=text, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    return [
        line for line in done.stdout.decode().splitlines() if re.match(r"[+-](?![+-]{2})", line)
    ]


@pytest.fixture(scope="module")
def ci_register():
    """`sglang.test.ci.ci_register` of the installed package, without importing sglang."""
    path = tree.find(None).package / "test/ci/ci_register.py"
    spec = importlib.util.spec_from_file_location("ci_register", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TESTS)
def test_registered_for_sglangs_ci(name, ci_register):
    (registry,) = ci_register.collect_tests([str(TESTS[name])])
    check_registration(registry, ci_register)


def check_registration(registry, ci_register) -> None:
    """Nothing in base takes more than 1200 seconds of est_time x GPUs."""
    assert registry.disabled is None and not registry.nightly
    assert registry.est_time > 0
    if registry.backend is ci_register.HWBackend.CPU:
        gpus = 1
        assert registry.effective_suite == "base-a-test-cpu"
    else:
        assert registry.backend is ci_register.HWBackend.CUDA
        gpus = RUNNER_GPUS[registry.runner_config]
        assert registry.effective_suite == f"{registry.stage}-test-{registry.runner_config}"
    in_base = registry.effective_suite.startswith("base-")
    assert in_base or registry.stage == "extra-b"
    assert not in_base or registry.est_time * gpus <= 1200


@pytest.mark.parametrize(
    "call, ok",
    [
        ('register_cpu_ci(est_time=1200, suite="base-a-test-cpu")', True),
        ('register_cpu_ci(est_time=1201, suite="base-a-test-cpu")', False),
        ('register_cpu_ci(est_time=0, suite="base-a-test-cpu")', False),
        ('register_cpu_ci(est_time=9, suite="base-b-test-cpu")', False),
        ('register_cuda_ci(est_time=9, stage="extra-b", runner_config="8-gpu-h200")', True),
        ('register_cuda_ci(est_time=2400, stage="extra-b", runner_config="8-gpu-b200")', True),
        ('register_cuda_ci(est_time=150, stage="base-c", runner_config="8-gpu-h200")', True),
        ('register_cuda_ci(est_time=151, stage="base-c", runner_config="8-gpu-h200")', False),
        ('register_cuda_ci(est_time=9, stage="extra-b", runner_config="9-gpu-h200")', False),
        ('register_cuda_ci(est_time=9, stage="spare-b", runner_config="8-gpu-h200")', False),
        ('register_cuda_ci(est_time=9, suite="extra-b-test-8-gpu-h200")', False),
        ('register_cuda_ci(est_time=9 + 1, stage="extra-b", runner_config="8-gpu-h200")', False),
        ('register_cuda_ci(est_time=9, stage="extra-b")', False),
        ('register_amd_ci(est_time=9, suite="base-a-test-cpu")', False),
    ],
)
def test_what_a_registration_may_say(call, ok, ci_register, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(f'{call}\nif __name__ == "__main__":\n    unittest.main()\n')
    try:
        (registry,) = ci_register.collect_tests([str(file)])
        check_registration(registry, ci_register)
    except (AssertionError, KeyError, ValueError):
        assert not ok
    else:
        assert ok


@pytest.mark.parametrize("name", TESTS)
def test_lies_where_sglang_keeps_tests(name):
    assert re.fullmatch(r"test/registered/[\w/]+/test_\w+\.py", name)
    assert Path(name).stem not in {Path(o).stem for o in TESTS if o != name}
