"""KV tokens per GPU of published deployments, on the release as it is against the series.

Models are public configurations (`named_models`). The weights that a GPU holds are the published
parameters at the checkpoint's bytes each, over 8 GPUs; a draft's are not counted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvgeom import __version__
from kvgeom.deployment.spec import GPU_ARCH, GPU_MEMORY, Request, TreePlan

if TYPE_CHECKING:
    from rich.console import Console

    from kvgeom.cpu_engine.libraries import Libraries
    from kvgeom.series import Series
    from kvgeom.tree import Tree

Answers = tuple[list[TreePlan], list[TreePlan]]  # as released, with the series

_CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
_DRAFT = "--speculative-draft-model-path"
EXACT = 1.005  # a page a pool is not counted as charged


class Deployment(NamedTuple):
    """`weights`: GiB of one GPU."""

    name: str
    weights: float
    arguments: str


DEPLOYMENTS = (
    Deployment(
        "DeepSeek-V3 (MLA), TP8 / DCP8, EAGLE (NextN)",
        79.7,  # 685 G parameters, FP8
        f"--model-path deepseek-v3 --tp-size 8 --dcp-size 8 --page-size 64 "
        f"--speculative-algorithm EAGLE {_CHAIN}",
    ),
    Deployment(
        "Kimi-Linear-48B (hybrid linear), TP8 / DCP8, DSPARK",
        11.2,  # 48 G parameters, BF16
        f"--model-path kimi-linear-48b --tp-size 8 --dcp-size 8 --page-size 64 --trust-remote-code "
        f"--speculative-algorithm DSPARK {_DRAFT} kimi-linear-48b-dspark",
    ),
    Deployment(
        "Llama-3.1-70B (GQA), TP8 / DCP4, EAGLE3",
        16.4,  # 70.6 G parameters, BF16
        f"--model-path llama-3.1-70b --tp-size 8 --dcp-size 4 --page-size 64 "
        "--attention-backend triton "  # the one that divides the locs of MHA pools
        f"--speculative-algorithm EAGLE3 {_DRAFT} llama-3.1-70b-eagle3 {_CHAIN}",
    ),
    Deployment(
        "gpt-oss-120b (hybrid SWA), TP8 / DCP8, EAGLE3",
        7.6,  # a checkpoint of 60.8 GiB, MXFP4
        f"--model-path gpt-oss-120b --tp-size 8 --dcp-size 8 --page-size 64 "
        f"--speculative-algorithm EAGLE3 {_DRAFT} gpt-oss-120b-eagle3 {_CHAIN}",
    ),
    Deployment(
        "GLM-5.2 (DSA, HiSparse), TP8, DSPARK",
        86.6,  # 744 G parameters, FP8
        f"--model-path glm-5.2 --tp-size 8 --enable-hisparse --disable-radix-cache "
        f"--speculative-algorithm DSPARK {_DRAFT} glm-5.2-dspark",
    ),
)


def requests(gpu_memory: float, gpu_arch: str) -> list[Request]:
    """One a deployment; `gpu_memory` in GiB."""
    return [
        Request(d.arguments.split(), gpu_memory, gpu_arch, d.weights, capacity=True)
        for d in DEPLOYMENTS
    ]


def answers(
    stack: Series,
    found: Tree,
    console: Console,
    gpu_memory: float = GPU_MEMORY,
    gpu_arch: str = str(GPU_ARCH),
    running: Libraries | None = None,
) -> Answers:
    """A plan a deployment, of both trees at once. `running`: see `planner`."""
    from kvgeom.boot_show import Steps
    from kvgeom.boot_tree import patched
    from kvgeom.deployment.run import planner

    copying, both = "copy", "tokens"
    asked = requests(gpu_memory, gpu_arch)
    with ExitStack() as held, planner(running) as ask, Steps(console, [copying, both]) as shown:
        with shown.step(copying) as on_event:
            copy = held.enter_context(patched(stack, found, lambda text: on_event(copying, text)))
        with shown.step(both) as on_event, ThreadPoolExecutor(2) as pool:
            on_event(both, f"SGLang resolves and sizes {len(asked)} deployments")
            jobs = [pool.submit(ask, tree.package, *asked) for tree in (found, copy)]
            released, with_series = (job.result() for job in jobs)
    return released, with_series


@dataclass(frozen=True)
class Side:
    """One tree's figures for a deployment. `charged` and `allocated`: bytes for a KV token, by the
    budget and by the buffers of target and draft; `refused`: why there are none."""

    tokens: int = 0
    charged: float = 0.0
    allocated: float = 0.0
    refused: str = ""

    @classmethod
    def of(cls, plan: TreePlan) -> Side:
        if plan.stop is not None:
            return cls(refused=plan.stop.message)
        taken = sum(pool.size for pool in plan.capacity.kv)
        return cls(plan.tokens, plan.capacity.charged, taken / plan.tokens)

    @property
    def over(self) -> float:
        """Allocated over charged; 1 where all that is allocated is charged."""
        return self.allocated / self.charged

    def cells(self) -> list[str]:
        if self.refused:
            return [self.refused, "", ""]
        return [f"{self.tokens:,}", f"{self.charged:,.0f}", f"{self.allocated:,.0f}"]


def why(released: Side, series: Side) -> str:
    """What the two figures differ by, in a sentence."""
    if released.refused or series.refused:
        return "refused"
    gib = 2**30 / released.tokens
    taken, budget = released.allocated / gib, released.charged / gib
    if released.over > EXACT:
        return f"the release builds {taken:.1f} GiB of KV in a budget of {budget:.1f}"
    if released.over < 1 / EXACT:
        return f"the release builds {taken:.1f} GiB of KV of a budget of {budget:.1f}"
    return "as charged in both"


def markdown(installed: list[TreePlan], with_series: list[TreePlan]) -> str:
    """A row a deployment."""
    head = ["deployment", "tokens", "charged", "allocated", "with the series: tokens", "charged",
            "allocated", "why"]  # fmt: skip
    lines = [head, ["---"] + ["---:"] * 6 + ["---"]]
    for deployment, *plans in zip(DEPLOYMENTS, installed, with_series, strict=True):
        released, series = map(Side.of, plans)
        cells = [*released.cells(), *series.cells()]
        lines.append([deployment.name, *cells, why(released, series)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def deployments(installed: list[TreePlan], with_series: list[TreePlan]) -> list[dict]:
    """Every deployment for `--json`; every pool's buffers are under `plan`."""

    def side(plan: TreePlan) -> dict:
        return {**asdict(Side.of(plan)), "plan": asdict(plan)}

    return [
        {**d._asdict(), "installed": side(was), "with_series": side(now)}
        for d, was, now in zip(DEPLOYMENTS, installed, with_series, strict=True)
    ]


def as_dict(installed: list[TreePlan], with_series: list[TreePlan], package: str) -> dict:
    """What `kvgeom plan --published --json` prints."""
    made = deployments(installed, with_series)
    return {"kvgeom": __version__, "tree": package, "deployments": made}
