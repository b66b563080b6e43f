"""Attention backends of every platform, constructed for real on CPU.

The table builders run under the Triton interpreter: set TRITON_INTERPRET=1 before
the first import of sglang.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.environ import envs
from sglang.test.attention_tables import (
    REQS,
    Guards,
    Spec,
    absent_pages,
    runner,
)
from sglang.test.test_utils import CustomTestCase

_BACKENDS = {
    "triton": ("triton_backend", "TritonAttnBackend"),
    "triton_draft": ("triton_backend", "TritonMultiStepDraftBackend"),
    "fa": ("flashattention_backend", "FlashAttentionBackend"),
    "fa_draft": ("flashattention_backend", "FlashAttentionMultiStepBackend"),
    "flashinfer": ("flashinfer_backend", "FlashInferAttnBackend"),
    "flashinfer_draft": ("flashinfer_backend", "FlashInferMultiStepDraftBackend"),
    "flashinfer_mla": ("flashinfer_mla_backend", "FlashInferMLAAttnBackend"),
    "flashinfer_mla_draft": (
        "flashinfer_mla_backend",
        "FlashInferMLAMultiStepDraftBackend",
    ),
    "trtllm_mha": ("trtllm_mha_backend", "TRTLLMHAAttnBackend"),
    "trtllm_mla": ("trtllm_mla_backend", "TRTLLMMLABackend"),
    "cutedsl_mla": ("cutedsl_mla_backend", "CuteDslMLABackend"),
    "tokenspeed_mla": ("tokenspeed_mla_backend", "TokenspeedMLABackend"),
    "flashmla": ("flashmla_backend", "FlashMLABackend"),
    "aiter": ("aiter_backend", "AiterAttnBackend"),
    "aiter_draft": ("aiter_backend", "AiterMultiStepDraftBackend"),
    "xpu": ("xpu_backend", "XPUAttentionBackend"),
    "wave": ("wave_backend", "WaveAttnBackend"),
    "qsa": ("qwen_sparse_attn_backend", "QwenSparseAttnBackend"),
    "minicpm": ("minicpm.backend", "MiniCPMSparseBackend"),
    "minimax": ("minimax_sparse_backend", "MiniMaxSparseAttnBackend"),
    "minimax_nvfp4": ("minimax_sparse_nvfp4_backend", "MiniMaxSparseNvfp4AttnBackend"),
    "dsv4_hip": ("deepseek_v4_backend_hip_radix", "DeepseekV4HipRadixBackend"),
    "ascend": ("ascend_backend", "AscendAttnBackend"),
}


def _module_name(name: str) -> str:
    package = (
        "sglang.srt.hardware_backend.npu.attention"
        if name == "ascend"
        else "sglang.srt.layers.attention"
    )
    return f"{package}.{_BACKENDS[name][0]}"


def _exists(module: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # its package may be absent
        return importlib.util.find_spec(module) is not None
    return False


# Those that this SGLang has.
BACKENDS = {
    name: _BACKENDS[name][1] for name in _BACKENDS if _exists(_module_name(name))
}


def module(name: str):
    return importlib.import_module(_module_name(name))


def build(name: str, m: SimpleNamespace, *args, **kwargs):
    """The real constructor."""
    if name == "tokenspeed_mla":
        m.kv_cache_dtype = torch.float8_e4m3fn  # it takes no other
    return vars(module(name))[BACKENDS[name]](m, *args, **kwargs)


class _DevicePackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that need their device: every name in them is a mock."""

    NAMES = ("flash_mla", "torch_npu", "sgl_kernel_npu", "wave_lang")
    WAVE = "sglang.srt.layers.attention.wave_ops"

    def __init__(self):
        self.made = []

    def find_spec(self, fullname, path, target=None):
        if fullname.split(".")[0] in self.NAMES or fullname.startswith(self.WAVE):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = MagicMock().__getattr__
        self.made.append(module.__name__)

    def remove(self):
        sys.meta_path.remove(self)
        for name in self.made:
            del sys.modules[name]


@contextlib.contextmanager
def device_free():
    """What the backends call to reach a device, replaced. No width comes from it."""
    finder = _DevicePackages()
    sys.meta_path.insert(0, finder)
    with contextlib.ExitStack() as stack:
        stack.callback(finder.remove)

        def mock(target, name, value=None):
            value = MagicMock() if value is None else value
            stack.enter_context(patch.object(target, name, value, create=True))

        for name in ("flashinfer", "flashinfer_mla"):
            mock(module(name), "BatchPrefillWithRaggedKVCacheWrapper")
            mock(module(name), "BatchPrefillWithPagedKVCacheWrapper")
            mock(module(name), "BatchDecodeWithPagedKVCacheWrapper")
            mock(module(name), "BatchMLAPagedAttentionWrapper")
        for name in ("trtllm_mha", "trtllm_mla"):
            mock(module(name), "make_persistent_multi_ctas_kv_counter_buffer")
        mock(module("trtllm_mla"), "_jit_fixup_module")
        mock(module("fa"), "get_device_capability", lambda *args: (9, 0))
        mock(module("aiter"), "reset_verify_attn_plan_cache")
        plan = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        mock(module("flashmla"), "get_mla_metadata", lambda *args, **kwargs: plan)
        sms = SimpleNamespace(multi_processor_count=4)
        mock(torch.cuda, "get_device_properties", lambda *args: sms)
        wave = importlib.import_module(f"{finder.WAVE}.decode_attention")
        shapes = (1,), (1,)
        mock(wave, "decode_attention_intermediate_arrays_shapes", lambda *args: shapes)
        stack.enter_context(envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.override(64))
        yield


class AttentionTableCase(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        stack = contextlib.ExitStack()
        stack.enter_context(device_free())
        cls.addClassCleanup(stack.close)

    @contextlib.contextmanager
    def case(self, spec: Spec, ctx: int, page: int, row: int = 0, **fields):
        """A runner whose row is wider than `ctx`: as wide as `spec` needs, or `row`."""
        row = row or spec.row(ctx, page)
        with self.subTest(spec=tuple(spec), ctx=ctx, page=page, row=row, **fields):
            with spec.published(page):
                yield runner(ctx, row, page, **fields)

    @contextlib.contextmanager
    def guarded(self):
        """Nothing made inside is written outside its bounds."""
        with Guards() as guards:
            yield
        self.assertEqual(guards.overruns(), [])

    def assert_holds(self, m, table: torch.Tensor, length: int, guards: Guards):
        self.assertEqual(guards.overruns(), [])
        self.assertEqual(absent_pages(m, table, length), [0] * REQS)
