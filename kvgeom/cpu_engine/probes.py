"""What a draft keeps and proposes for each request: to compare two runs, or two rounds of one."""

from __future__ import annotations

import functools
import hashlib

import torch

from kvgeom.cpu_engine import geometry


class DraftRows:
    """Digests of the draft's cache rows of a prompt's whole allocator pages, on one rank.

    Only whole pages are cached, evicted and loaded back. `report` gets the request, the rank and
    the SHA-256 over the rows' bytes of every buffer, once the request is finished.
    """

    def __init__(self, scheduler, rank: int, report):
        self.rank, self.report = rank, report
        runner = geometry.draft_runner(scheduler)
        self.buffers = [] if runner is None else geometry.pool_buffers(runner.token_to_kv_pool)
        self.table = scheduler.tp_worker.model_runner.req_to_token_pool.req_to_token
        self.page = scheduler.tp_worker.model_runner.token_to_kv_pool_allocator.page_size

    def running(self, reqs) -> list[tuple]:
        """(request, locs of its pages) while the rows of the table are still the requests'."""
        if not self.buffers:
            return []
        return [(req, self._locs(req)) for req in reqs if not req.finished()]

    def report_finished(self, running: list[tuple]) -> None:
        """Call when the batch's result has been processed, before another batch runs."""
        for req, locs in running:
            if req.finished():
                self.report(
                    "draft_rows", request=req.rid, rank=self.rank, digest=self._digest(locs)
                )

    def _locs(self, req) -> torch.Tensor:
        whole = len(req.origin_input_ids) // self.page * self.page
        return self.table[req.kv.req_pool_idx, :whole].clone()

    def _digest(self, locs: torch.Tensor) -> str:
        found = hashlib.sha256()
        for buffer in self.buffers:
            rows = buffer[locs[locs < buffer.shape[0]].long()]  # a pool may be too small
            found.update(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return found.hexdigest()


def watch_dspark_blocks(report) -> None:
    """Report every block of tokens that a DSPARK draft proposes, with its request."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockProposer

    propose = DraftBlockProposer.propose

    @functools.wraps(propose)
    def watched(self, *, batch, **rest):
        proposal = propose(self, batch=batch, **rest)
        blocks = proposal.draft_block.draft_tokens.tolist()
        for req, tokens in zip(batch.reqs, blocks, strict=True):
            report("drafted", request=req.rid, tokens=tokens)
        return proposal

    DraftBlockProposer.propose = watched
