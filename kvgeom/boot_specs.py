"""Which steps `kvgeom boot` runs, and the engines that they need."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from kvgeom.errors import KvgeomError

if TYPE_CHECKING:
    from kvgeom.cpu_engine import EngineSpec

# The models have 8 heads, the MLA backends take pages of 32 and 64, and at dcp 2 no request reaches
# the rows that a draft pool lacks.
SIZES = (4, 8)


class Pair(StrEnum):
    MQA = "mqa"
    MLA = "mla"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class Step(StrEnum):
    GEOMETRY = "geometry"
    SERVE = "serve"
    REFUSE = "refuse"
    OVERRUN = "overrun"
    ROWS = "rows"
    TOKENS = "tokens"


def choose(step: list[Step] | None, pair: Pair) -> list[Step]:
    """The steps to run, each once; KvgeomError (2) for one that the pair cannot do."""
    if pair is Pair.MLA and Step.ROWS in (step or []):
        raise KvgeomError(
            "--step rows runs at pages of 1 and 4, and the backends of --pair mla take 32 and 64",
            "leave --pair out",
            exit_code=2,
        )
    every = [s for s in Step if pair is Pair.MQA or s not in (Step.ROWS, Step.TOKENS)]
    return list(dict.fromkeys(step or every))


def check_device(device: Device, tp: int) -> None:
    """KvgeomError (2) unless there is a device for every rank."""
    if device is Device.CPU:
        return
    try:
        import torch

        found = torch.cuda.device_count()
    except ImportError:
        found = 0
    if found < tp:
        raise KvgeomError(
            f"--device cuda needs {tp} CUDA devices, one a rank, and {found} were found",
            "leave --device out: the same engine runs on the CPU",
            exit_code=2,
        )


def engine_specs(pair: str, tp: int, dcp: int, device: str = "cpu") -> dict[str, EngineSpec]:
    """The engine of every run. KvgeomError (2) for parallel sizes that the pair cannot do."""
    from kvgeom.cpu_engine import EngineSpec

    if tp not in SIZES or dcp not in SIZES or tp % dcp:
        raise KvgeomError(
            f"--tp {tp} --dcp {dcp}: the pairs run with tp and dcp 4 or 8, and dcp at most tp",
            "leave both out for 8 and 8",
            exit_code=2,
        )
    own = EngineSpec(pair=pair).resolved()
    page = own.page * own.dcp // dcp  # the allocator's page, and so the load, stays the same
    both = {"pair": str(pair), "device": str(device)}
    patched = EngineSpec(**both, tp=tp, dcp=dcp, page=page).resolved()
    return {
        "patched": patched,
        "control": EngineSpec(**both, tp=1, dcp=1).resolved(),
        "refuse": replace(patched, faults=("draft-page",)),
        "overrun": replace(
            patched,
            faults=("draft-page", "no-assertion"),
            bounds=True,
            prompts=(_prompt_to_the_end(patched),),
            max_new_tokens=1,
        ),
    }


def _prompt_to_the_end(spec: EngineSpec) -> tuple[int, ...]:
    """A prompt whose last token lies one row past a draft pool that is paged by `spec.page`."""
    length = (spec.max_total_tokens - spec.page) * spec.dcp + spec.page + 1
    return tuple(3 + 7 * i % 120 for i in range(length))
