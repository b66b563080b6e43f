"""Whether SGLang's argument validation permits a server of `budget_servers`."""

from __future__ import annotations

import contextlib
import traceback
from typing import Iterator, Optional
from unittest.mock import patch

import torch

from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from sglang.test.budget_servers import Draft, Target
from sglang.test.kv_pools import remembered_fields
from sglang.test.pool_budgets import model_fields

_BLACKWELL = {
    "is_cuda": True,
    "is_sm90": False,
    "is_sm100": True,
    "is_sm100_or_sm110": True,
    "is_sm110": False,
    "is_sm120": False,
    "is_blackwell": True,
    "is_hopper_with_cuda_12_3": False,
    "has_flashinfer": True,
    "device_capability": (10, 0),
    "device_sm": 100,
}
_MEMORY_MIB = 180 * 1024


class Refused(Exception):
    """By the function of SGLang that the message names."""


@contextlib.contextmanager
def blackwell() -> Iterator[None]:
    """Inside, SGLang is told of a GPU that takes every KV dtype."""
    with (
        remembered_fields(),
        override_platform(**_BLACKWELL),
        patch.object(torch.cuda, "get_device_capability", lambda *args: (10, 0)),
        patch.object(
            memory_hook, "get_device_memory_capacity", lambda *args: _MEMORY_MIB
        ),
    ):
        yield


def resolved(target: Target, draft: Optional[Draft], *, dcp_size: int) -> Target:
    """`target` with the attention backends that SGLang resolves; Refused where its
    validation refuses the server."""
    try:
        args = ServerArgs(
            device="cuda",
            tp_size=8,
            dcp_size=dcp_size,
            skip_tokenizer_init=True,
            max_running_requests=2,
            mem_fraction_static=0.5,
            **model_fields(target, draft),
        )
        args.resolve_once()
        args.check_server_args()
    except (AssertionError, ValueError, NotImplementedError, RuntimeError) as error:
        raise Refused(refusing(error)) from error
    prefill, decode = attention_backends_of(resolved_view(args))
    backends = {
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
    }
    return target._replace(fields={**target.fields, **backends})


def refusing(error: Exception) -> str:
    """The function that raised `error`."""
    return traceback.extract_tb(error.__traceback__)[-1].name
