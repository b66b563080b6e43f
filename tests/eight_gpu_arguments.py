"""Run in a patched tree: SGLang's own resolution of the server arguments of the 8-GPU tests.

python eight_gpu_arguments.py TEST_FILE; prints JSON, {class: {field: value} or error}.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import unittest
from pathlib import Path

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

FIELDS = (
    "tp_size", "dcp_size", "page_size", "speculative_algorithm", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "enable_hierarchical_cache", "max_total_tokens",
    "max_running_requests", "context_length", "decode_attention_backend", "attention_backend",
    "load_snapshot_publish_interval",
)  # fmt: skip
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 163840,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
KDA = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 8,
    "head_dim": 8,
    "short_conv_kernel_size": 4,
}
# A model of each kind, the size of a config file, in place of the one that is downloaded.
MODELS = {
    "Kimi-Linear": ("KimiLinearForCausalLM", "kimi_linear", {**MLA, "linear_attn_config": KDA}),
    "Moonlight": ("DeepseekV3ForCausalLM", "deepseek_v3", MLA),
    "DeepSeek": ("DeepseekV3ForCausalLM", "deepseek_v3", MLA),
    "EAGLE3": ("LlamaForCausalLMEagle3", "llama", {}),
    "Llama": ("LlamaForCausalLM", "llama", {}),
}


BLACKWELL = {
    "is_cuda": True, "is_blackwell": True, "is_sm100": True, "is_sm100_or_sm110": True,
    "device_sm": 100, "device_capability": (10, 0),
}  # fmt: skip
HOPPER = {"is_cuda": True, "is_sm90": True, "device_sm": 90, "device_capability": (9, 0)}


def stand_in(root: Path, name: str) -> str:
    kind = next(kind for kind in MODELS if kind in name)
    architecture, model_type, more = MODELS[kind]
    folder = root / kind
    folder.mkdir(exist_ok=True)
    config = {**TINY, **more, "architectures": [architecture], "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def resolve(case, root: Path, platform: dict) -> dict | str:
    """What a launch of the class resolves to, or the sentence that refuses it."""
    folder = root / case.__name__
    folder.mkdir(exist_ok=True)
    argv = ["--model-path", stand_in(root, case.model), *case.server_args(str(folder))]
    argv = [stand_in(root, a) if a == case.draft_model else a for a in argv]
    try:
        with override_platform(**platform):
            server_args = prepare_server_args([*argv, "--device", "cuda"])
            server_args.resolve_once()
            view = resolved_view(server_args)
            return {field: getattr(view, field) for field in FIELDS}
    except (AssertionError, NotImplementedError, ValueError) as error:
        return str(error)


def main() -> None:
    spec = importlib.util.spec_from_file_location("eight_gpu", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    cases = {type(test) for tests in suite for test in tests}
    with tempfile.TemporaryDirectory() as root:
        found = {
            case.__name__: {
                "blackwell": resolve(case, Path(root), BLACKWELL),
                "hopper": resolve(case, Path(root), HOPPER),
                "tests": unittest.defaultTestLoader.getTestCaseNames(case),
            }
            for case in cases
        }
    print("\n" + json.dumps(found))


main()
