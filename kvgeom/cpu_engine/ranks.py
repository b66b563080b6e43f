"""What runs inside a forked rank: SGLang's own scheduler, watched from a subclass."""

from __future__ import annotations

import dataclasses
import os

from kvgeom.cpu_engine import faults, probes
from kvgeom.cpu_engine.bounds import Watch
from kvgeom.cpu_engine.channel import Channel
from kvgeom.cpu_engine.geometry import rank_geometry
from kvgeom.cpu_engine.spec import EngineSpec


def run_rank(spec: EngineSpec, channel: Channel, server_args, port_args, gpu_id, tp_rank, *rest):
    """A rank's entry in place of SGLang's `run_scheduler_process`, which it prepares and calls."""
    from sglang.srt.managers import scheduler

    watch = Watch(spec, tp_rank, channel.send, lambda end: channel.send("row_end", end=end))
    try:
        watch.install()
        if spec.draft and spec.algorithm == "DSPARK" and tp_rank == 0:
            probes.watch_dspark_blocks(channel.send)
        faults.inject(spec.faults)
    except Exception as error:
        channel.error("boot", error, tp_rank)
        os._exit(1)
    scheduler.Scheduler = _watched(scheduler.Scheduler, spec, watch, channel, tp_rank)
    return scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest)


def _watched(base, spec: EngineSpec, watch: Watch, channel: Channel, rank: int):
    """`base` (SGLang's Scheduler), reporting geometry, token usage, tokens and errors."""

    class WatchedScheduler(base):
        def __init__(self, *args, **kwargs):
            self._peak_usage, self._token_counts, self._to_check = 0.0, {}, False
            self._draft_rows = None
            try:
                super().__init__(*args, **kwargs)
                watch.name_pools(self)
                if spec.hicache:  # the rows are evicted and come back
                    self._draft_rows = probes.DraftRows(self, rank, channel.send)
                geometry = rank_geometry(self, rank)
            except Exception as error:
                channel.error("boot", error, rank)
                raise
            channel.send("geometry", geometry=dataclasses.asdict(geometry))

        def run_event_loop(self):
            try:
                super().run_event_loop()
            except Exception as error:
                channel.error("serve", error, rank)
                raise

        def run_batch(self, *args, **kwargs):
            self._sample_usage()  # the round's pages are taken; it may not come to its end
            result = super().run_batch(*args, **kwargs)
            self._sample_usage()  # before finished requests give their pages back
            return result

        def on_idle(self):
            super().on_idle()  # raises where locs or rows were lost
            if self._to_check and self.is_fully_idle():
                self._to_check = False
                channel.send("idle", rank=rank)

        def _sample_usage(self):
            # SGLang's own figure, by the call that its metrics make.
            usage = self.pool_stats_observer.get_pool_stats().get_max_pool_usage()
            if usage > self._peak_usage:
                self._peak_usage = usage
                channel.send("usage", usage=usage)

        def process_batch_result(self, batch, result):
            reqs = list(batch.reqs)
            if not self._to_check:
                self._to_check = True
                channel.send("busy", rank=rank)
            running = self._draft_rows.running(reqs) if self._draft_rows else []
            super().process_batch_result(batch, result)
            if self._draft_rows:
                self._draft_rows.report_finished(running)
            if rank == 0:
                self._token_counts.update({req.rid: len(req.output_ids) for req in reqs})
                channel.send("tokens", count=sum(self._token_counts.values()))

    return WatchedScheduler
