"""Tiny KV pools on CPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, Callable
from unittest.mock import patch

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

DTYPE = torch.float32
_FIELDS_OF = functools.cache(msgspec.structs.fields)


class OnCPU(TorchFunctionMode):
    """Makes on the CPU what code inside it makes on CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def remembered_fields() -> contextlib.AbstractContextManager:
    """msgspec evaluates each annotation of a class whenever it is asked; SGLang asks
    at every server."""
    return patch.object(msgspec.structs, "fields", _FIELDS_OF)


def build_with(build: Callable, **arguments) -> Any:
    """`build` with those of `arguments` that it takes."""
    taken = inspect.signature(build).parameters
    return build(**{k: v for k, v in arguments.items() if k in taken})


def mha_pool(size: int, page_size: int) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=DTYPE,
        head_num=1,
        head_dim=4,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )


def swa_pool(size: int, size_swa: int, page_size: int, full_layers=(0,)) -> SWAKVPool:
    return SWAKVPool(
        size=size,
        size_swa=size_swa,
        page_size=page_size,
        dtype=DTYPE,
        head_num=1,
        head_dim=4,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=list(full_layers),
        device="cpu",
    )


def mamba_params(layers: list[int]) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=8,
        n_groups=1,
        num_heads=2,
        head_dim=4,
        state_size=4,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=layers)
