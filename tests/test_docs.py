"""Every command of README.md and docs/*.md: run here in an environment of its own, or by another
test that is named here."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import generate
import pytest
from conftest import RELEASE, linked_installation
from plugin_site import PluginSite

from kvgeom import series

REPOSITORY = generate.REPOSITORY
PAGES = {str(page.relative_to(REPOSITORY)): page.read_text("utf-8") for page in generate.PAGES}
PLAN = next(c for c in generate.blocks(PAGES["docs/operators.md"]))
# command -> the test that runs it; CI: .ci/run does.
CI = ".ci/run"
ELSEWHERE = {
    "make run": CI,
    "make test": CI,
    "make lint": CI,
    "make run PAIR=mla": "tests/test_boot_engine.py::test_every_claim_holds",
    "make docs": "tests/test_docs.py::test_make_docs_fills_the_blocks",
    "kvgeom boot": "tests/test_boot_engine.py::test_the_docs_show_what_it_prints",
    "kvgeom doctor --pid N": "tests/test_serving.py::test_the_plugin_serves",
    "kvgeom doctor --log server.log": "tests/test_serving.py::test_the_plugin_serves",
    "python -m sglang.launch_server --model-path MODEL --dcp-size 8": (
        "tests/test_serving.py::test_the_plugin_serves"
    ),
    "KVGEOM_PLUGIN=0 python -m sglang.launch_server --model-path MODEL --dcp-size 8": (
        "tests/test_plugin.py::test_off"
    ),
    "kvgeom export --onto sglang --branch dcp-geometry --bodies bodies": (
        "tests/test_export.py::test_bodies_say_where_in_the_stack_they_are"
    ),
    "kvgeom lock": "tests/test_cli.py::test_lock",
    "kvgeom lock --update": "tests/test_cli.py::test_lock",
    "kvgeom lock --release 0.5.24": (
        "tests/test_releases_table.py::test_a_release_is_added_by_one_command"
    ),
    "kvgeom lock --release 0.5.24 --update": (
        "tests/test_releases_table.py::test_a_release_is_added_by_one_command"
    ),
    "kvgeom releases --table": "tests/test_releases_table.py::test_the_docs_show_the_table",
}

# A second run changes nothing.
ONCE = ("kvgeom plan", "kvgeom diff --pr", "pip install .", "pip wheel")


@dataclass(frozen=True)
class Command:
    """`output`: what stands below it; None where nothing does."""

    line: str
    output: str | None = None


def commands(page: str) -> list[Command]:
    """Of every fenced block, in order. A block of another kind than these is an error."""
    found, blocks = [], re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", page, re.MULTILINE)
    assert 2 * len(blocks) == len(re.findall("```", page)), "a fence without an end"
    for kind, text in blocks:
        if kind == "sh":
            whole = re.sub(r" \\\n +", " ", text)
            lines = (line.split(" #")[0].strip() for line in whole.splitlines())
            found += [Command(line) for line in lines if line]
        elif kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                found.append(Command(*part.split("\n", 1)))
        else:
            assert kind in ("dockerfile", "toml"), kind
    return found


def dockerfile() -> list[str]:
    (text,) = re.findall(r"^```dockerfile\n(.*?)^```$", PAGES["docs/operators.md"], re.M | re.S)
    return text.splitlines()


def environment_in(root: Path) -> PluginSite:
    """An environment with SGLang, its libraries and pip in it, without any kvgeom."""
    root.mkdir(exist_ok=True)
    site = PluginSite(root, None)
    linked_installation(site.packages)
    libraries = root / "libraries"
    libraries.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "kvgeom" not in entry.name:
            (libraries / entry.name).symlink_to(entry)
    (site.packages / "zz_libraries.pth").write_text(str(libraries))
    pip = site.python.with_name("pip")
    pip.write_text(f'#!/bin/sh\nexec {site.python} -m pip "$@"\n')
    pip.chmod(0o755)
    return site


def run(site: PluginSite, line: str, folder: Path) -> subprocess.CompletedProcess:
    path = f"{site.python.parent}{os.pathsep}{os.environ['PATH']}"
    environment = site.environment(PATH=path, COLUMNS="100", PIP_DISABLE_PIP_VERSION_CHECK="1")
    environment.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        ["sh", "-ec", line], env=environment, cwd=folder, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkout") / "kvgeom"
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    for name in listed.stdout.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, root / name)
    return root


@pytest.fixture(scope="module")
def said(site, checkout):
    """said(line) -> the end of a command in the site, of those in ONCE the end of the first."""
    ended = {}

    def call(line: str) -> subprocess.CompletedProcess:
        if line not in ended:
            done = run(site, line, checkout)
            if not line.startswith(ONCE):
                return done
            ended[line] = done
        return ended[line]

    return call


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> PluginSite:
    return environment_in(tmp_path_factory.mktemp("site"))


def test_a_page_names_a_test_for_what_is_not_run_here():
    """And that test exists; no line of the table is left over."""
    shown = {c.line for page in PAGES.values() for c in commands(page)}
    assert set(ELSEWHERE) <= shown
    ci = (REPOSITORY / CI).read_text("utf-8").splitlines()
    for line, name in ELSEWHERE.items():
        if name == CI:
            assert line in ci
        else:
            file, _, test = name.partition("::")
            tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
            assert test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


# The page that uninstalls is the last one.
@pytest.mark.parametrize("page", [*(p for p in PAGES if "operators" not in p), "docs/operators.md"])
def test_commands_run(page, site, said):
    """In the order given. The verdict of the plan is a bad one, so it ends with 1."""
    printed = {}
    for command in commands(PAGES[page]):
        if command.line in ELSEWHERE:
            continue
        done = said(command.line)
        assert done.returncode == (command.line == PLAN), f"{command.line}: {done.stderr}"
        if command.output is not None:
            shown = generate.block(command.line, done.stdout)
            assert shown == generate.blocks(PAGES[page])[command.line], "make docs"
        printed[command.line] = done.stdout
    if page == "README.md":
        quoted = re.findall(r"^    (.*safe: .*?)(?: \.\.\.)?$", PAGES[page], re.MULTILINE)
        verdicts = printed[PLAN].splitlines()[:2]
        assert [v[: len(q)] for v, q in zip(verdicts, quoted, strict=True)] == quoted
        assert printed["kvgeom doctor"].startswith(f"sound: SGLang {RELEASE} as released")
        changed = "+++ b/python/sglang/srt/mem_cache/kv_cache_configurator.py"
        assert changed in printed["kvgeom diff"]
        assert "files changed" in printed["kvgeom apply"]
        assert str(site.packages) in printed["kvgeom status"]
        assert not (site.packages / "sglang/srt/mem_cache/page_geometry.py").exists()
    if page == "docs/operators.md":
        assert not (site.packages / "kvgeom").exists()


def test_the_lines_of_the_dockerfile(tmp_path, checkout, said):
    """COPY and RUN, in an environment as the image has one; its /tmp is a folder of ours."""
    image, copy, execute = dockerfile()
    assert image == f"FROM lmsysorg/sglang:v{RELEASE}"
    site, folder = environment_in(tmp_path / "image"), tmp_path / "tmp"
    folder.mkdir()
    wheel = "pip wheel --no-deps --wheel-dir dist ."
    assert Command(wheel) in commands(PAGES["docs/operators.md"])
    assert said(wheel).returncode == 0, said(wheel).stderr
    for line in (copy.replace("COPY", "cp"), execute.removeprefix("RUN ")):
        done = run(site, line.replace("/tmp/", f"{folder}/"), checkout)
        assert done.returncode == 0, done.stderr
    assert (site.packages / "sglang/srt/mem_cache/page_geometry.py").is_file()
    assert (site.packages / "kvgeom.pth").is_file()


def test_make_docs_fills_the_blocks(tmp_path, monkeypatch):
    """Those between marks, from what a real command prints, and nothing else."""
    page = tmp_path / "page.md"
    page.write_text("one\n<!-- kvgeom --version -->\nold\n<!-- end -->\ntwo\n")
    monkeypatch.setattr("sys.argv", ["generate.py", str(page)])
    generate.main()
    printed = generate.run("kvgeom --version")
    filled = f"```console\n$ kvgeom --version\n{printed}```\n"
    assert page.read_text() == f"one\n<!-- kvgeom --version -->\n{filled}<!-- end -->\ntwo\n"
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    assert "\n\t$(BIN)/python docs/generate.py\n" in makefile


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, _, heading in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", PAGES[page]):
        path = (REPOSITORY / page).parent / target if target else REPOSITORY / page
        assert path.is_file(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in slugs, f"{target}#{heading}"


def test_the_reviewers_read_of_every_pr():
    listed = re.findall(r"^\| `([\w-]+)` \|", PAGES["docs/reviewers.md"], re.MULTILINE)
    assert listed == [pr.id for pr in series.load().prs]


def test_the_readme_is_one_screen():
    assert len(PAGES["README.md"].splitlines()) <= 80
