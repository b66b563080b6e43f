"""SGLang's own parsing, resolution and publication of a launch command, on a GPU that is not there.

Run as on a CUDA machine: `prepare_server_args`, `ServerArgs.resolve_once`, `publish`. What is
answered in place of the hardware is in `gpu`: the platform's facts, through SGLang's own override,
compute capability and memory. Modules that looked for a GPU when they were imported found none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
from collections.abc import Callable, Iterator
from unittest.mock import patch

from kvgeom.deployment import named_models
from kvgeom.deployment.spec import Request, Stop

_CAPABILITY = {"sm90": (9, 0), "sm100": (10, 0)}
# What the platform answers; one that is not named here is asked on this machine.
_FACTS = {
    "sm90": {"is_sm90": True, "is_hopper_with_cuda_12_3": True},
    "sm100": {"is_sm100": True, "is_sm100_or_sm110": True, "is_blackwell": True},
}
_NOT = dict.fromkeys(
    ("is_sm90", "is_sm100", "is_sm100_or_sm110", "is_sm110", "is_sm120", "is_blackwell",
     "is_hopper_with_cuda_12_3"),
    False,
)  # fmt: skip
# Modules that took the memory query's name when they were imported.
_ASKS_MEMORY = (
    "sglang.srt.arg_groups.memory_hook",
    "sglang.srt.arg_groups.kv_shard_hook",
    "sglang.srt.arg_groups.model_overrides.qwen3_vl",
    "sglang.srt.mem_cache.kv_cache_configurator",
)


class Stopped(Exception):
    """Ends the plan with a reason."""

    def __init__(self, by: str, message: str, kind: str = ""):
        super().__init__(message)
        self.stop = Stop(by, kind, message)


@contextlib.contextmanager
def gpu(request: Request) -> Iterator[None]:
    """Inside, SGLang is told of a GPU of this architecture and memory."""
    import torch
    from sglang.srt import runtime_context

    capability = _CAPABILITY[request.gpu_arch]
    facts = _NOT | _FACTS[request.gpu_arch]
    facts |= {"is_cuda": True, "has_flashinfer": True, "device_capability": capability}
    facts["device_sm"] = capability[0] * 10 + capability[1]
    mebibytes = request.gpu_memory * 1024
    with contextlib.ExitStack() as stack:
        stack.enter_context(runtime_context.override_platform(**_known(facts)))
        stack.enter_context(
            patch.object(torch.cuda, "get_device_capability", lambda *args: capability)
        )
        for module in filter(importlib.util.find_spec, _ASKS_MEMORY):
            name = f"{module}.get_device_memory_capacity"
            stack.enter_context(patch(name, lambda *args: mebibytes))
        yield


def _known(facts: dict) -> dict:
    """Those that this release asks its platform for."""
    from sglang.srt.runtime_context import _PLATFORM_PROBES, _PLATFORM_VALUES

    asked = {*_PLATFORM_PROBES, *_PLATFORM_VALUES}
    return {name: answer for name, answer in facts.items() if name in asked}


def taken(build: Callable, **arguments):
    """`build` with those of `arguments` that this release's has."""
    wanted = inspect.signature(build).parameters
    return build(**{name: value for name, value in arguments.items() if name in wanted})


def published(request: Request):
    """The ServerArgs of the command, resolved, and published for rank 0.

    Stopped: what SGLang's parser or validation says against it, or a model that is not here.
    """
    from sglang.srt.runtime_context import SpawnRanks, publish

    args = _parsed(request.arguments)
    args.model_path = _model_folder(args.model_path, "--model-path")
    draft = args.speculative_draft_model_path
    if draft is not None:
        args.speculative_draft_model_path = _model_folder(draft, "--speculative-draft-model-path")
    if args.device is None:
        args.device = "cuda"  # what SGLang finds where there is a GPU
    args.resolve_once()
    args.check_server_args()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return args


def _parsed(arguments: list[str]):
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return prepare_server_args(arguments)
    except SystemExit:
        message = said.getvalue().strip().rpartition("error: ")[2]
        raise Stopped("arguments", message.replace("\n", " ")) from None


def _model_folder(model: str, flag: str) -> str:
    try:
        return str(named_models.folder(model, flag))
    except ValueError as error:
        raise Stopped("kvgeom", str(error)) from None
