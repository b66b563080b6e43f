"""`kvgeom doctor` against the release itself: its log line, and its own row sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

from conftest import REPOSITORY
from test_doctor import kvgeom
from test_doctor_rules import spec

from kvgeom import exposure

PROGRAM = """
import itertools, json, sys, types
from sglang.srt.mem_cache import allocation_sizing as sizing

def past(algorithm, steps, topk, tokens, page, dcp, context):
    bag = types.SimpleNamespace
    sizing.get_spec = lambda: bag(
        speculative_algorithm=algorithm, speculative_num_steps=steps, speculative_eagle_topk=topk)
    sizing.max_speculative_num_draft_tokens = lambda: tokens
    sizing.get_schedule = lambda: bag(page_size=page)
    sizing.get_parallel = lambda: bag(attn_dcp_size=dcp)
    request = bag(kv=bag(kv_allocated_len=0, kv_committed_len=context - 4))
    _, ends, _ = sizing.page_aligned_decode_alloc_lens(
        [request], reserve=sizing.get_alloc_reserve_per_decode(), page_size=page * dcp)
    return ends[0] - context - sizing.get_req_to_token_extra_context_len()

cases = json.load(sys.stdin)
json.dump([past(*case) for case in cases], sys.stdout)
"""


def test_entries_past_a_row_are_what_the_release_works_out():
    """On SGLang's own sizing functions, for every algorithm."""
    cases = [
        (algorithm, steps, topk, tokens, page, dcp, context)
        for algorithm in ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
        for steps, topk, tokens in ((1, 1, 2), (3, 1, 4), (5, 4, 8), (1, 10, 12), (1, 1, 16))
        for page in (1, 4, 64)
        for dcp in (1, 8)
        for context in (4096, 4099)
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(cases), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    ours = []
    for algorithm, steps, topk, tokens, page, dcp, context in cases:
        words = spec(algorithm, f"{steps}/{topk}/{tokens}", page=page, dcp=dcp)
        words = exposure.entries_past_row(
            dataclasses.replace(words, context=context), headroom_is_widened=True
        )
        ours.append(words)
    assert ours == [max(0, past) for past in theirs] and max(ours) > 0


LOGGED = """
import logging, sys
from kvgeom.cpu_engine import stub
stub.install()  # the kernels' binaries need a GPU's driver
logging.basicConfig(level="INFO", format="[%(asctime)s] %(message)s")
from sglang.srt.entrypoints import engine
from sglang.srt.server_args import prepare_server_args
arguments = prepare_server_args(sys.argv[1:])
arguments.resolve_once()
engine.logger.info(f"server_args={engine._server_args_for_logging(arguments)}")
"""


def test_the_log_of_the_release(tmp_path):
    """The line as the release writes it, of arguments that it has resolved itself."""
    from kvgeom.cpu_engine import gates, models

    target, draft = models.target_and_draft("mqa", "cpu", "STANDALONE")
    words = f"--model-path {target} --device cpu --page-size 1 --attention-backend triton "
    words += f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft}"
    done = subprocess.run(
        [sys.executable, "-c", LOGGED, *words.split()],
        env={**os.environ, **gates.ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    log = tmp_path / "server.log"
    log.write_text(done.stderr)
    done = kvgeom("doctor", "--log", log)
    assert done.returncode == 1
    # What nobody gave, SGLang chose: its sizes for Llama.
    assert "dcp 1, page 1, EAGLE3 5/4/8" in done.stdout
    assert done.stdout.startswith("affected: ") and "writes 24 entries" in done.stdout
