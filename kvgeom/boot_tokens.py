"""`kvgeom boot --step tokens`: KV tokens that published deployments get, and whether their pools
take what they are charged. By SGLang's configurators, as released and with the series; no engine.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvgeom.deployment.published import DEPLOYMENTS, EXACT, Side, requests

if TYPE_CHECKING:
    from kvgeom.boot_checks import Claim
    from kvgeom.deployment.spec import TreePlan
    from kvgeom.series import Series
    from kvgeom.tree import Tree

GPU_MEMORY, GPU_ARCH = 141.0, "sm90"  # an H200
Answers = tuple["list[TreePlan]", "list[TreePlan]"]  # as released, with the series


def run(stack: Series, found: Tree, console: Console) -> Answers:
    """A plan a deployment, of both trees at once."""
    from kvgeom.boot_show import Steps
    from kvgeom.boot_tree import patched
    from kvgeom.deployment.run import ask

    copying, both = "copy", "tokens"
    asked = requests(GPU_MEMORY, GPU_ARCH)
    with ExitStack() as held, Steps(console, [copying, both]) as shown:
        with shown.step(copying) as on_event:
            copy = held.enter_context(patched(stack, found, lambda text: on_event(copying, text)))
        with shown.step(both) as on_event, ThreadPoolExecutor(2) as pool:
            on_event(both, f"SGLang resolves and sizes {len(asked)} deployments")
            jobs = [pool.submit(ask, tree.package, *asked) for tree in (found, copy)]
            released, with_series = (job.result() for job in jobs)
    return released, with_series


def show(out: Console, answers: Answers) -> None:
    """A line a deployment."""
    bytes_of_both = "GiB built / charged"
    columns = "as released", bytes_of_both, "with the series", bytes_of_both
    shown = Table("KV tokens of one H200", *columns, pad_edge=False)
    for deployment, *plans in zip(DEPLOYMENTS, *answers, strict=True):
        cells = [cell for plan in plans for cell in _cells(Side.of(plan))]
        shown.add_row(deployment.name, *cells)
    out.print(shown)


def _cells(side: Side) -> tuple[str, str]:
    if side.refused:
        return side.refused, ""
    built, charged = (side.tokens * n / 2**30 for n in (side.allocated, side.charged))
    return f"{side.tokens:,}", f"{built:.1f} / {charged:.1f}"


def tokens_claim(answers: Answers) -> Claim:
    """With the series what is charged is what is allocated; the release builds more somewhere."""
    from kvgeom.boot_checks import Claim

    released, series = ([Side.of(plan) for plan in plans] for plans in answers)
    for deployment, was, now in zip(DEPLOYMENTS, released, series, strict=True):
        refused = was.refused or now.refused
        if refused:
            return Claim("tokens", False, f"{deployment.name}: {refused}")
        if not 1 / EXACT <= now.over <= EXACT:
            built = f"the pools take {now.over:.3f} of what is charged, with the series"
            return Claim("tokens", False, f"{deployment.name}: {built}")
    over = [was.over for was in released if was.over > EXACT]
    text = (
        f"{len(series)} published deployments take what they are charged; the release builds up to "
        f"{max(over, default=1):.1f} times its budget in {len(over)} of them"
    )
    return Claim("tokens", bool(over), text)
