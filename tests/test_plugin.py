"""The plugin in an environment of its own, with a little series and a little SGLang."""

from __future__ import annotations

import subprocess
import time

import pytest
from conftest import make_series, make_tree, snapshot
from plugin_site import PluginSite, build_wheel

from kvgeom import actions, hooks, install
from kvgeom import tree as trees

SHOW = "import sglang.srt.mem_cache.rows as rows; print(rows.Rows().width(1), rows.__file__)"
# The little SGLang has no plugin loader.
CHECK = f"""{SHOW}
import kvgeom.plugin as plugin
plugin._check_hooks_when_applied = plugin._log_geometry = lambda served: None
plugin.check()
"""


@pytest.fixture
def site(tmp_path):
    """An environment with a little SGLang, and the little series reviewed for it."""
    made = PluginSite(tmp_path, build_wheel())
    make_tree(made.packages)
    made.little = make_series(tmp_path / "series")
    made.little.review(trees.find(made.packages))
    made.use_series(made.little.root)
    return made


def refusal(done) -> str:
    """The reason that a process gave when it ended itself."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == "kvgeom: KVGEOM_PLUGIN=0 starts SGLang without the series"
    return "\n".join(lines)


def test_the_series_is_served_and_the_installation_untouched(site):
    before = snapshot(site.packages / "sglang")
    done = site.run(CHECK)
    assert done.returncode == 0, done.stderr
    width, file = done.stdout.split()
    assert width == "9" and file.startswith(str(site.cache / "kvgeom/trees/0.5.23-"))
    said = done.stderr.splitlines()
    assert said[:2] == ["kvgeom: copying SGLang 0.5.23", "kvgeom: applying the series to the copy"]
    stack = site.little.load()
    assert said[2].startswith(f"kvgeom: series {stack.id} on SGLang 0.5.23, from {site.cache}")
    again = site.run(CHECK)
    assert again.stdout == done.stdout and len(again.stderr.splitlines()) == 1
    assert snapshot(site.packages / "sglang") == before


@pytest.mark.parametrize("variables", [{"KVGEOM_PLUGIN": "0"}, {"SGLANG_PLUGINS": "another, one"}])
def test_off(site, variables):
    done = site.run(CHECK, **variables)
    assert done.stdout.startswith("5 ") and str(site.packages) in done.stdout
    assert done.stderr == "" and not site.cache.exists()


def test_on_by_name(site):
    assert site.run(SHOW, SGLANG_PLUGINS="another,kvgeom").stdout.startswith("9 ")


def test_looking_for_sglang_does_nothing_yet(site):
    look = "import importlib.util as u; print(u.find_spec('sglang').origin)"
    assert site.run(look).stdout.strip() == str(site.packages / "sglang/__init__.py")
    assert site.run("import json").returncode == 0
    assert not site.cache.exists()


def test_a_process_that_is_started_is_served_without_planning(site):
    """By spawn, as SGLang starts its schedulers: the function is found by importing its module."""
    program = (
        "import multiprocessing as m, sys\n"
        "from sglang.srt.geometry import pages\n"
        "child = m.get_context('spawn').Process(target=pages.check, args=(1, 2))\n"
        "child.start(); child.join(); sys.exit(child.exitcode)\n"
    )
    pages = (
        "import sys, kvgeom.plugin\n\n\nPAGE = 64\n\n\ndef check(a, b):\n"
        "    print(__file__, kvgeom.plugin._is_first, 'libcst' in sys.modules)\n"
    )
    site.little.file("python/sglang/srt/geometry/pages.py", pages)
    site.use_series(site.little.root)
    done = site.run(program)
    assert done.returncode == 0, done.stderr
    file, first, planner = done.stdout.split()
    assert file.startswith(str(site.cache)) and (first, planner) == ("False", "False")


def test_what_was_handed_down_counts_for_the_same_installation_only(site):
    stale = '{"package": "/x", "release": "0.5.23", "series": "s", "copy": "/x"}'
    for text in (stale, "{}", "no json"):
        assert site.run(SHOW, KVGEOM_SERVED=text).stdout.startswith("9 ")


def test_a_release_that_nobody_reviewed(site):
    info = next(site.packages.glob("sglang-*.dist-info"))
    text = (info / "METADATA").read_text().replace("0.5.23", "0.5.99")
    (info / "METADATA").write_text(text)
    said = refusal(site.run(SHOW))
    assert "SGLang 0.5.99" in said and "supported: 0.5.23" in said


def test_code_that_nobody_reviewed(site):
    rows = site.packages / "sglang/srt/mem_cache/rows.py"
    rows.write_text(rows.read_text().replace("n + 4", "n + 5"))
    assert "the series does not fit this SGLang 0.5.23" in refusal(site.run(SHOW))


def test_a_cache_that_cannot_be_written(site):
    site.cache.write_text("")
    assert "set XDG_CACHE_HOME" in refusal(site.run(SHOW))


def apply(site) -> None:
    command = "import sys; from kvgeom.cli import main; sys.argv[1:] = ['apply']; main()"
    done = site.run(command)
    assert done.returncode == 0, done.stderr


def test_in_place_as_well(site):
    apply(site)
    done = site.run(CHECK)
    assert done.stdout.startswith("9 ") and str(site.packages) in done.stdout
    said = done.stderr.splitlines()
    assert len(said) == 1 and "applied in place, the plugin does nothing" in said[0]


def test_an_upgrade_under_an_applied_series(site):
    apply(site)
    info = next(site.packages.glob("sglang-*.dist-info"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n")
    said = refusal(site.run(SHOW))
    assert "applied to another release, then SGLang was replaced" in said
    assert "kvgeom doctor" in said


def test_an_applied_series_that_somebody_changed(site):
    apply(site)
    (site.packages / "sglang/srt/mem_cache/rows.py").write_text("x = 1\n")
    assert "changed by somebody else" in refusal(site.run(SHOW))


def test_sglang_imported_before_the_hook(site):
    (site.packages / "early.pth").write_text("import sglang.srt.mem_cache.rows\n")
    said = refusal(site.run(CHECK))
    assert "before the plugin could patch it" in said and "kvgeom apply --tree" in said


def test_a_module_from_elsewhere(site):
    elsewhere = site.packages / "sglang/srt/mem_cache"
    program = (
        "import sys, sglang.srt.mem_cache as cache\n"
        f"cache.__path__.insert(0, {str(elsewhere)!r})\n{CHECK}"
    )
    said = refusal(site.run(program))
    assert "sglang.srt.mem_cache.rows was imported from " + str(elsewhere) in said


def test_a_served_process_is_known_to_the_doctor(site, tmp_path):
    from kvgeom import running

    program = f"{SHOW}; import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [site.python, "-c", program], env=site.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        file = process.stdout.readline().split()[1]
        deadline = time.monotonic() + 10
        while not (copy := running.served_copy(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    assert copy is not None and file.startswith(str(copy))


@pytest.mark.parametrize(
    "target, changed",
    [
        ("sglang.srt.mem_cache.rows.Rows.width", True),
        ("sglang.srt.mem_cache.rows.Rows", True),
        ("sglang.srt.mem_cache.pools.Builder.page", True),
        ("sglang.srt.mem_cache.pools.logger", False),
        ("sglang.srt.geometry.pages.check", True),
        ("sglang.srt.other.thing", False),
    ],
)
def test_names_that_the_series_changes(little, target, changed):
    stack, root = little
    tree = trees.find(root)
    actions.apply(stack, tree, dry_run=False, wait_s=0, say=print)
    assert hooks.is_changed(tree, install.read_manifest(tree), target) is changed
