"""The gates of the DSPARK draft, for SGLang 0.5.23. See `gates`."""

from __future__ import annotations

from types import ModuleType

from kvgeom.cpu_engine.gates import View, answer_to, gate


@gate(
    "sglang.srt.arg_groups.speculative_hook",
    why="DSPARK is refused unless the device is called cuda, npu or xpu",
    expects={"_handle_dspark": "server_args", "resolving_view": "server_args"},
)
def dspark_on_cpu(module: ModuleType) -> None:
    answer_to(module, "resolving_view", ["_handle_dspark"], lambda own: View(own, device="cuda"))


@gate(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2",
    why="tells CUDA's allocator which stream uses a tensor; CPU memory has no streams",
    expects={
        "torch": None,
        "DSparkWorkerV2._forward_decode": "self batch on_publish grammar_barrier coordination_plan",
    },
)
def no_streams(module: ModuleType) -> None:
    module.torch.Tensor.record_stream = lambda self, stream: None
