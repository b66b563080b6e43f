"""`kvgeom boot --step tokens`: KV tokens that published deployments get, and whether their pools
take what they are charged. By SGLang's configurators, as released and with the series; no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvgeom.deployment.published import DEPLOYMENTS, EXACT, Side

if TYPE_CHECKING:
    from kvgeom.boot_checks import Claim
    from kvgeom.deployment.published import Answers


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
