"""How many KV tokens a GPU gets, what a token is charged, and what the pools take: in the child."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import torch

from kvgeom.deployment.spec import Capacity, PoolBuffers


def measure(runners: list[SimpleNamespace]) -> Capacity:
    """Of the runners of a target and of its draft, by SGLang's own budget and pools."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.test.pool_budgets import leaves, pool_bytes

    target = runners[0]
    budget = create_memory_pool_configurator(target.configurator)
    kv = [
        PoolBuffers(owner, type(pool).__name__, pool_bytes(pool), buffers(pool))
        for owner, runner in zip(("target", "draft"), runners, strict=False)
        for pool in leaves(runner.token_to_kv_pool)
    ]
    rows = target.req_to_token_pool
    requests = PoolBuffers("target", type(rows).__name__, _bytes(rows), buffers(rows))
    return Capacity(charged=float(budget._cell_size), kv=kv, requests=requests)


def buffers(pool) -> list[list]:
    """Every kind of tensor on the meta device that `pool` holds, itself or in a part of it."""
    found = Counter((name, tuple(t.shape), str(t.dtype)) for name, t in _held(pool))
    return [[name, count, list(shape), dtype] for (name, shape, dtype), count in found.items()]


def _bytes(pool) -> int:
    return sum(tensor.nbytes for _, tensor in _held(pool))


def _held(pool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in sorted(vars(pool).items()):
        yield from ((name, tensor) for tensor in _tensors(value))
        if type(value).__module__.startswith("sglang.srt.mem_cache"):
            for part, inner in sorted(vars(value).items()):
                yield from ((f"{name}.{part}", tensor) for tensor in _tensors(inner))


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            yield value
        return
    if dataclasses.is_dataclass(value):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        yield from _tensors(item)
