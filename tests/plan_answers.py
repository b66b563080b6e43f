"""Plans of the installed release and of a copy with the series, for several files of tests.

The workers of one run share them: the first that needs a plan asks for all.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch_commands
import launch_families
import pytest
from filelock import FileLock

from kvgeom import boot_tree, series
from kvgeom.cpu_engine.libraries import Libraries
from kvgeom.cpu_engine.spec import decode
from kvgeom.deployment import published
from kvgeom.deployment.run import Ask, planner
from kvgeom.deployment.spec import GPU_ARCH, GPU_MEMORY, Request, TreePlan
from kvgeom.tree import Tree, find

Both = tuple[TreePlan, TreePlan]  # the release's answer, the series'


def asked(arguments: list[str]) -> Request:
    return Request(arguments, GPU_MEMORY, str(GPU_ARCH), weights=20.0)


def both(ask: Ask, found: Tree, requests: dict[str, Request]) -> dict[str, Both]:
    """What `found` and a copy with the series make of each, by name; asked at the same time."""
    with boot_tree.patched(series.load(), found, print) as copy, ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(ask, tree.package, *requests.values()) for tree in (found, copy)]
        return dict(zip(requests, zip(*(job.result() for job in jobs), strict=True), strict=True))


@pytest.fixture(scope="session")
def planned(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, running: Libraries
) -> dict[str, Both]:
    """Of every launch command, published deployment and plain server, by name."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        root = root.parent
    answers = root / "plans.json"
    with FileLock(f"{answers}.lock"):
        if not answers.is_file():
            with planner(running) as ask:
                made = both(ask, find(None), _requests(tmp_path_factory.mktemp("models")))
            answers.write_text(json.dumps(made, default=dataclasses.asdict))
    found = json.loads(answers.read_text())
    return {name: tuple(decode(TreePlan, p) for p in plans) for name, plans in found.items()}


def _requests(folder: Path) -> dict[str, Request]:
    """Models that they need are written below `folder`."""
    commands = launch_commands.commands(folder) | launch_families.commands(folder)
    deployments = published.requests(GPU_MEMORY, str(GPU_ARCH))
    return {
        **{name: asked(arguments) for name, arguments in commands.items()},
        **{d.name: r for d, r in zip(published.DEPLOYMENTS, deployments, strict=True)},
        **{
            name: dataclasses.replace(asked(arguments.split()), weights=16.0, capacity=True)
            for name, arguments in launch_commands.PLAIN.items()
        },
    }
