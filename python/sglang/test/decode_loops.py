"""The scheduler's real decode loops around a model that accepts a fixed run.

Real: the event loops, the cap on new tokens, `update_running_batch` with its prepare,
and the result processor. Stand-ins: the model, requests' arrival, metrics, output.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import torch

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_schedule, get_server_args, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.decode_prepare import (
    attach_spec_info,
    guard_rows,
    kv_holder,
    new_req,
    prefilled_batch,
    tree_cache,
)
from sglang.test.kv_pools import build_with
from sglang.test.row_builders import BUILDERS, MODEL_CONFIG

TOKENS = 4096
# Which real loop runs; "interleaved" gives every second step to another request's
# prefill, so that a decode result is processed with nothing in flight.
LOOPS = ("normal", "overlap", "overlap interleaved", "PD decode overlap")


class Idle(Exception):
    """Ends a loop that has nothing left to run."""


class Anything:
    """Takes every call; a MagicMock would cost more than the loop around it."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args, **kwargs) -> Anything:
        return self


class Step(NamedTuple):
    """One prepared decode step of the request, in tokens."""

    committed: int  # on the host, when its prepare ran
    on_device: int  # what verify starts from
    allocated: int


class DecodeLoop:
    """One request of `input_len` tokens, decoded as far as the scheduler lets it."""

    def __init__(self, context_len: int, input_len: int, *, accept: int, loop: str):
        self.loop, self.accept = loop, accept
        self.overlap = loop != "normal"
        self.steps: list[Step] = []
        self.rows, self.allocator = BUILDERS["plain"](context_len, TOKENS, 4)
        guard_rows(self.rows)
        self.cache = tree_cache(self.rows, self.allocator)
        self.scheduler = object.__new__(Scheduler)
        self.processor = self._processor()
        self._fill_scheduler(context_len)
        self.req = new_req("r", input_len)
        self.scheduler.init_req_max_new_tokens(self.req)
        self.pending = self._batch([self.req])
        self.on_device = input_len
        self.num_prefills = 0

    def run(self) -> list[Step]:
        with contextlib.suppress(Idle):
            if self.loop == "PD decode overlap":
                self._start_prebuilt()
                self.scheduler.event_loop_overlap_disagg_decode()
            elif self.overlap:
                self.scheduler.event_loop_overlap()
            else:
                self.scheduler.event_loop_normal()
        return self.steps

    def _batch(self, reqs) -> ScheduleBatch:
        return prefilled_batch(
            reqs, self.rows, self.allocator, self.cache, overlap=self.overlap
        )

    def _worker_info(self, context_len: int) -> tuple:
        """What the real worker tells the scheduler: the cap is in it."""
        runner = SimpleNamespace(
            effective_logical_max_total_num_tokens=TOKENS,
            logical_max_total_num_tokens=TOKENS,
            effective_max_total_num_tokens=TOKENS,
            max_total_num_tokens=TOKENS,
            dcp_size=1,
            token_to_kv_pool_allocator=self.allocator,
            max_running_requests=4,
            forward_stream=None,
            req_to_token_pool=self.rows,
            token_to_kv_pool=SimpleNamespace(size=TOKENS),
        )
        worker = SimpleNamespace(
            model_runner=runner,
            model_config=SimpleNamespace(context_len=context_len),
            ps=SimpleNamespace(attn_dcp_size=1),
            dllm_algorithm=None,
            random_seed=0,
            device="cpu",
        )
        return TpModelWorker.get_worker_info(worker)

    def _fill_scheduler(self, context_len: int) -> None:
        info, anything = self._worker_info(context_len), Anything()
        self.scheduler.__dict__.update(
            server_args=get_server_args(),
            max_total_num_tokens=info[0],
            max_req_len=info[4],
            max_req_input_len=info[5],
            max_new_tokens_limit=None,
            kv_shard_widening=1,
            page_size=get_schedule().page_size,
            token_to_kv_pool_allocator=self.allocator,
            sliding_window_size=None,
            chunked_prefill_size=None,
            tree_cache=self.cache,
            enable_overlap=self.overlap,
            enable_skip_finishing_decode=False,
            result_queue=[],
            decode_offload_manager=None,
            forward_ct=1,
            new_token_ratio_tracker=anything,
            metrics_reporter=anything,
            gracefully_exit=False,
            _engine_paused=False,
            require_mlp_sync=False,
            enable_unified_memory=False,
            is_generation=True,
            invariant_checker=anything,
            running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
            last_batch=None,
            cur_batch_for_debug=None,
            spec_algorithm=SpeculativeAlgorithm.from_string(
                get_spec().speculative_algorithm
            ),
            ingest_requests=lambda: None,
            request_receiver=anything,
            process_input_requests=lambda reqs: None,
            get_next_batch_to_run=self._next_batch,
            run_batch=self._run_batch,
            process_batch_result=self._process,
            _apply_war_barrier=lambda: None,
            launch_batch_sample_if_needed=lambda *args: None,
            on_idle=self._stop,
        )

    def _processor(self) -> SchedulerBatchResultProcessor:
        anything = Anything()
        return build_with(
            SchedulerBatchResultProcessor,
            server_args=get_server_args(),
            is_generation=True,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_overlap=self.overlap,
            enable_overlap_mlx=False,
            model_config=MODEL_CONFIG,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
            req_to_token_pool=self.rows,
            decode_offload_manager=None,
            metrics_collector=anything,
            metrics_reporter=Anything(num_generated_tokens=0, forward_ct_decode=0),
            draft_worker=anything,
            model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *a, **k: None),
            logprob_result_processor=anything,
            output_streamer=anything,
            beam_coordinator=anything,
            abort_request=anything,
        )

    def _stop(self) -> None:
        raise Idle

    def _process(self, batch, result) -> None:
        if batch.forward_mode.is_extend():
            self.processor.process_batch_result_prefill(batch, result)
        else:
            self.processor.process_batch_result_decode(batch, result)

    def _start_prebuilt(self) -> None:
        """A PD decode server processes the transferred prefill before it decodes."""
        batch, self.pending = self.pending, None
        self._process(batch, self._run_batch(batch))
        batch.filter_batch()
        self.scheduler.__dict__.update(
            running_batch=batch,
            disagg_decode_prealloc_queue=Anything(),
            process_decode_queue=lambda: None,
            get_next_disagg_decode_batch_to_run=lambda *, running_batch: (
                self._next_batch(running_batch=running_batch, last_batch=None)
            ),
            ngram_embedding_manager=SimpleNamespace(
                prepare_for_forward=lambda batch, chunked_req: batch
            ),
            chunked_req=None,
        )

    def _next_batch(self, *, running_batch, last_batch) -> NextBatchPlan:
        if self.pending is not None:
            batch, self.pending = self.pending, None
            return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
        decoded = last_batch is not None and last_batch.forward_mode.is_decode()
        if last_batch is not None and self.req in last_batch.reqs and not decoded:
            last_batch.filter_batch()
            running_batch = last_batch
        elif decoded and self.loop == "overlap interleaved":
            self.num_prefills += 1
            other = new_req(f"p{self.num_prefills}", 2, max_new_tokens=1)
            return NextBatchPlan(
                batch_to_run=self._batch([other]), running_batch=running_batch
            )
        if not running_batch.is_empty():
            attach_spec_info(running_batch)
            committed = kv_holder(self.req).kv_committed_len
            running_batch = self.scheduler.update_running_batch(running_batch)
        if running_batch.is_empty():
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        self.steps.append(Step(committed, self.on_device, self.req.kv.kv_allocated_len))
        return NextBatchPlan(batch_to_run=running_batch, running_batch=running_batch)

    def _run_batch(self, batch) -> GenerationBatchResult:
        num_reqs = len(batch.reqs)
        if batch.forward_mode.is_extend() or batch.spec_algorithm.is_none():
            self.on_device += not batch.forward_mode.is_extend()
            return GenerationBatchResult(
                next_token_ids=torch.zeros(num_reqs, dtype=torch.int64)
            )
        self.on_device += self.accept
        stride = max(self.accept, get_spec().speculative_num_draft_tokens)
        return build_with(
            GenerationBatchResult,
            next_token_ids=torch.zeros(num_reqs * stride, dtype=torch.int64),
            accept_lens=torch.full((num_reqs,), self.accept, dtype=torch.int32),
            speculative_output_stride=stride,
            speculative_num_draft_tokens=stride,
            num_non_draft_tokens_per_req=(
                2 if get_spec().speculative_algorithm == "UNO" else 1
            ),
        )
