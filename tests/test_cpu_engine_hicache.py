"""HiCache on the CPU engine: pages go to the host pools and come back, with the same tokens."""

from __future__ import annotations

import pytest
from engine_fixtures import report_of

from kvgeom.cpu_engine import EngineReport, EngineSpec

pytestmark = pytest.mark.engine

LOCS = 1536  # six pages of 256; a prompt keeps two of them


def prompt(number: int) -> tuple[int, ...]:
    return tuple(3 + (7 * i + i // 120 * (5 + number) + 31 * number) % 120 for i in range(560))


PROMPTS = tuple(prompt(number) for number in (0, 1, 2, 3, 0, 1))


@pytest.fixture(scope="module")
def report(released_engines):
    def run(tp: int, hicache: bool) -> EngineReport:
        spec = EngineSpec(
            pair="mla", tp=tp, dcp=tp, draft=False, max_total_tokens=LOCS // tp,
            prompts=PROMPTS, max_new_tokens=4, in_turn=True, hicache=hicache,
        )  # fmt: skip
        found = report_of(released_engines, spec)
        assert found.ok, found.error
        return found

    return run


def assert_same_output(one: EngineReport, other: EngineReport) -> None:
    assert one.outputs == other.outputs and all(one.outputs)
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("tp", [1, 8])
def test_evicted_pages_come_back_from_the_host(report, tp):
    cached, plain = report(tp, True), report(1, False)
    assert_same_output(cached, plain)
    assert cached.outputs[4:] == cached.outputs[:2]
    # The two that are sent again lie on the host by then, and not on the device.
    assert cached.cached_tokens[4:] == [512, 512] if tp == 8 else [544, 544]
    assert plain.cached_tokens[4:] == [0, 0]
    layers, share = 2, 512 // tp if tp == 8 else 544
    assert cached.host_rows["target back"] == 2 * share * layers
    assert cached.idle_ranks == [*range(tp)]


def test_the_host_pools_of_every_rank(report):
    for rank in report(8, True).geometry:
        host = rank.host
        assert host.logical_size == 8 * host.size > rank.allocator.size
        assert host.page_size == rank.target.page_size and rank.draft_host is None
    assert report(1, False).geometry[0].host is None
