"""Bounds mode for Triton kernels, on small kernels of our own under the real interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

# The kernels have to be in a file, where Triton can read their source.
PROGRAM = """
import json, sys
import torch, triton, triton.language as tl
from kvgeom.cpu_engine import kernel_writes

@triton.jit
def fill(out, other, count, offset, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + offset + lane, lane + 1, mask=lane < count)

class Overrun(AssertionError):
    pass

def on_overrun(*what):
    raise Overrun(*what)

kernel_writes.watch(on_overrun)
for line in sys.stdin:
    name, count, offset = json.loads(line)
    whole = torch.zeros(64, dtype=torch.int32)
    out, other = torch.zeros(8, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    buffer = {"out": out, "view": whole[8:16], "other": other}[name]
    try:
        fill[(1,)](buffer, other, count, offset, SIZE=32)
        said = []
    except Overrun as error:
        said = list(error.args)
    found = {"said": said, "out": buffer.tolist(), "whole": whole.tolist()}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Iterator[Callable[..., dict]]:
    """launch(buffer, count, offset) -> what is said, and the buffers after it."""
    program = tmp_path_factory.mktemp("kernels") / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    ) as process:  # fmt: skip

        def of(buffer: str, count: int, offset: int = 0) -> dict:
            print(json.dumps([buffer, count, offset]), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield of
        process.stdin.close()
        assert process.wait(timeout=120) == 0


def test_a_store_within_the_buffer_is_made(launch):
    assert launch("out", 8) == {
        "said": [], "out": [1, 2, 3, 4, 5, 6, 7, 8], "whole": [0] * 64,
    }  # fmt: skip


@pytest.mark.parametrize("count, offset, element", [(9, 0, 8), (1, 8, 8), (20, 3, 8)])
def test_a_store_past_the_end_is_named_and_not_made(launch, count, offset, element):
    found = launch("out", count, offset)
    assert found["said"] == ["fill", "out", element, 8]
    assert found["out"] == [0] * 8


def test_the_buffer_of_a_view_is_its_whole_storage(launch):
    found = launch("view", 12)
    assert found["said"] == [] and found["whole"][8:20] == [*range(1, 13)]


def test_the_element_size_counts(launch):
    assert launch("other", 5)["said"] == ["fill", "out", 4, 4]
