"""Calls at the edge of a chunk of frames."""

from __future__ import annotations

import resource

import pytest

from kvgeom.cpu_engine.frames import with_room

CALLS = 500


def faults_at(depth: int) -> int:
    """Page faults of CALLS calls, `depth` frames further down."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def leaf(value: int) -> list[int]:
    """Its frame is larger than that of `faults_at`, so that at some depth it alone does not fit."""
    return [
        value, value, value, value, value, value, value, value, value, value, value, value, value,
        value, value, value, value, value, value, value, value, value, value, value, value, value,
    ]  # fmt: skip


def worst() -> int:
    return max(faults_at(depth) for depth in range(400))


def test_no_call_maps_memory_where_there_is_room():
    assert worst() >= CALLS  # at some depth every call does
    assert with_room(worst) < CALLS / 10


def test_answers_and_errors_pass_through():
    assert with_room(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 / 0)
