"""One engine: runs in a process forked from the parent, and forks its ranks."""

from __future__ import annotations

import functools
import importlib
import tempfile
from pathlib import Path

from kvgeom.cpu_engine import models, ranks
from kvgeom.cpu_engine.channel import Channel
from kvgeom.cpu_engine.spec import EngineSetupError, EngineSpec

SCENARIOS = "sglang.test.kits.dcp_draft_geometry_kit"
BACKENDS = {
    "mqa": {"attention_backend": "triton"},
    # Prefill goes through trtllm_mla by SGLang's own choice; verify through the decode backend.
    "mla": {"decode_attention_backend": "cutedsl_mla", "speculative_attention_mode": "decode"},
}


def server_arguments(spec: EngineSpec) -> dict:
    """ServerArgs of a resolved spec. Everything not named here is SGLang's default."""
    target, draft = models.target_and_draft(spec.pair, spec.device, spec.algorithm)
    arguments = {
        "model_path": str(target),
        "device": spec.device,
        "dtype": "float32",  # bfloat16 is wrong under the Triton interpreter
        "tp_size": spec.tp,
        "dcp_size": spec.dcp,
        "page_size": spec.page,
        "context_length": spec.context,
        "max_total_tokens": spec.max_total_tokens,
        "max_running_requests": spec.max_running,
        "sampling_backend": "pytorch",
        "random_seed": 0,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "disable_cuda_graph": True,
        "watchdog_timeout": 3600,
        "log_level": "error",
    }
    arguments |= BACKENDS[spec.pair]
    if spec.device == "cpu":  # each split is a turn of the interpreter's loop
        arguments["triton_attention_num_kv_splits"] = 1
    if spec.hicache:
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
        }
    if spec.scenario:  # token usage is read in every round
        arguments["load_snapshot_publish_interval"] = 1
    if spec.draft:
        arguments |= {
            "speculative_algorithm": spec.algorithm,
            "speculative_draft_model_path": str(draft),
            "speculative_draft_attention_backend": "triton",
            "speculative_num_draft_tokens": spec.draft_tokens,
        }
        if spec.algorithm != "DSPARK":  # one step of one block, by its own rule
            arguments |= {
                "speculative_num_steps": spec.steps,
                "speculative_eagle_topk": spec.topk,
            }
    return arguments


def engine_class(spec: EngineSpec, channel: Channel):
    """SGLang's Engine with our rank entry; on CPU it forks where it would spawn."""
    import multiprocessing

    from sglang.srt.entrypoints import engine

    configure = engine._set_envs_and_config

    def configure_and_fork(server_args):
        configure(server_args)
        # Spawned ranks would each import sglang again.
        multiprocessing.set_start_method("fork", force=True)

    if spec.device == "cpu":
        engine._set_envs_and_config = configure_and_fork

    class WatchedEngine(engine.Engine):
        run_scheduler_process_func = staticmethod(functools.partial(ranks.run_rank, spec, channel))

    return WatchedEngine


def run_engine(spec: EngineSpec, channel: Channel, scratch: Path) -> None:
    """Boot, serve the spec's prompts greedily, send the result. Errors go over the channel."""
    tempfile.tempdir = str(scratch)  # SGLang's IPC sockets
    stage = "boot"
    try:
        scenario = _scenario(spec)
        channel.send("stage", stage="weights", detail=spec.pair)
        arguments = server_arguments(spec)
        what = "with a draft" if spec.draft else "without a draft"
        channel.send("stage", stage="boot", detail=f"tp {spec.tp} dcp {spec.dcp} {what}")
        engine = engine_class(spec, channel)(**arguments)
        stage = "serve"
        what = spec.scenario or f"{len(spec.prompts)} requests"
        channel.send("stage", stage="serve", detail=what)
        replies = scenario(_Client(engine)) if scenario else _serve(engine, spec)
        for _ in range(2):  # between two answers every rank has run its idle memory check
            engine.get_server_info()
        channel.send("result", replies=[_reply(reply) for reply in replies])
    except Exception as error:
        channel.error(stage, error, None)


def _scenario(spec: EngineSpec):
    """The spec's scenario, from the tree; EngineSetupError where it is not there."""
    if spec.scenario is None:
        return None
    try:
        return getattr(importlib.import_module(SCENARIOS), spec.scenario)
    except (ModuleNotFoundError, AttributeError) as error:
        raise EngineSetupError(f"scenario {spec.scenario!r} is not in this tree: {error}") from None


class _Client:
    """The engine as a scenario's client."""

    def __init__(self, engine):
        self._engine = engine
        self.server_info = engine.get_server_info

    def generate(self, input_ids: list[list[int]], max_new_tokens: int) -> list[dict]:
        return self._engine.generate(
            input_ids=input_ids,
            sampling_params={
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            return_logprob=True,
        )

    def token_usage(self) -> float:
        loads = self._engine.tokenizer_manager.load_snapshot_reader.read_all()
        return max((load.token_usage for load in loads), default=0.0)


def _serve(engine, spec: EngineSpec) -> list[dict]:
    """The prompts all at once, or one after the other."""
    prompts = [list(prompt) for prompt in spec.prompts]
    client, replies = _Client(engine), []
    for batch in [[prompt] for prompt in prompts] if spec.in_turn else [prompts]:
        replies += client.generate(batch, spec.max_new_tokens)
    return replies


def _reply(reply: dict) -> dict:
    meta = reply["meta_info"]
    return {
        "request": meta["id"],
        "tokens": reply["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "accept_length": meta.get("spec_accept_length", 0.0),
        "cached_tokens": meta["cached_tokens"],
    }
