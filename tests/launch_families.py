"""Launch commands of the kinds of KV pool beyond the plain one, and the models that they need."""

from __future__ import annotations

import json
from pathlib import Path

from launch_commands import GQA, MLA, shape

CHAIN = shape(3, 1, 4)
EAGLE = ["--speculative-algorithm", "EAGLE", *CHAIN]
_DRAFT = "--speculative-draft-model-path"
SWA = ["--model-path", "gpt-oss-120b", "--tp-size", "8", "--speculative-algorithm", "EAGLE3"]
SWA += [_DRAFT, "gpt-oss-120b-eagle3", *CHAIN]
DSA = ["--model-path", "glm-5.2", "--tp-size", "8"]
HISPARSE = [*DSA, "--enable-hisparse", "--disable-radix-cache"]
DFLASH = ["--speculative-algorithm", "DFLASH", _DRAFT, "{dflash}"]
_TP8 = ["--tp-size", "8"]
HICACHE = [*_TP8, "--enable-hierarchical-cache"]

# {name} is the folder of MODELS[name].
FAMILIES = {
    "swa": [*SWA, "--context-length", "8192"],
    "swa dcp": [*SWA, "--dcp-size", "8", "--page-size", "64"],
    "dsa dcp": [*DSA, "--dcp-size", "8", *EAGLE],
    "hisparse": [*HISPARSE, "--speculative-algorithm", "DSPARK", _DRAFT, "glm-5.2-dspark"],
    "dflash": [*GQA, *DFLASH],
    "dflash dcp": [*GQA, "--dcp-size", "4", "--page-size", "64", "--attention-backend", "triton",
                   *DFLASH],
    "undivided": [*GQA, "--dcp-size", "4", "--page-size", "64", "--attention-backend", "fa3"],
    "multi-layer": [*MLA, "--dcp-size", "8", "--page-size", "64", *EAGLE,
                    "--enable-multi-layer-eagle"],
    "window drafts": ["--model-path", "{step}", *_TP8, *EAGLE, "--enable-multi-layer-eagle",
                      "--context-length", "8192"],
    "hicache": [*HICACHE, "--model-path", "kimi-linear-48b", "--dcp-size", "8", "--page-size", "64",
                "--trust-remote-code", "--speculative-algorithm", "DSPARK", _DRAFT,
                "kimi-linear-48b-dspark"],
    "hicache swa": [*SWA, "--page-size", "64", "--enable-hierarchical-cache"],
    "hicache dsa": [*HICACHE, "--model-path", "glm-5.2", "--speculative-algorithm", "DSPARK",
                    _DRAFT, "glm-5.2-dspark"],
    "minimax": ["--model-path", "{minimax}", *_TP8],
    "pipeline": [*GQA, "--pp-size", "2"],
    "pipeline uneven": ["--model-path", "{odd}", *_TP8, "--pp-size", "2"],
    "uno": ["--model-path", "llama-3.1-70b", "--speculative-algorithm", "UNO",
            "--speculative-num-draft-tokens", "8", "--uno-lora-path", "{step}",
            "--attention-backend", "fa3"],
    "frozen": ["--model-path", "{gemma4}", *_TP8, "--speculative-algorithm", "NEXTN", _DRAFT,
               "{gemma4-assistant}", *CHAIN],
}  # fmt: skip

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
_GEMMA = {
    "model_type": "gemma4_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
    "vocab_size": 262144,
    "max_position_embeddings": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}
MODELS = {
    "dflash": {**_LLAMA, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5,
               "block_size": 16, "target_layer_ids": [1, 20, 40, 60, 78],
               "mask_token_id": 128255},
    "step": {**_LLAMA, "architectures": ["Step3p5ForCausalLM"], "num_hidden_layers": 48,
             "sliding_window": 512, "num_nextn_predict_layers": 3, "num_attention_groups": 8,
             "layer_types": ["sliding_attention", "full_attention"] * 24},
    "minimax": {**_LLAMA, "architectures": ["MiniMaxM3SparseForCausalLM"],
                "sparse_attention_config": {"sparse_attention_freq": [0] + [1] * 79,
                                            "sparse_disable_index_value": [0] * 40 + [1] * 40,
                                            "sparse_index_dim": 128}},
    "odd": {**_LLAMA, "num_hidden_layers": 81},
    "gemma4": {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
               "torch_dtype": "bfloat16", "text_config": _GEMMA},
    "gemma4-assistant": {"architectures": ["Gemma4AssistantForCausalLM"],
                         "model_type": "gemma4_assistant", "torch_dtype": "bfloat16",
                         "text_config": {**_GEMMA, "num_hidden_layers": 4,
                                         "layer_types": ["sliding_attention"] * 3
                                         + ["full_attention"],
                                         "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0,
                                         "num_kv_shared_layers": 4}},
}  # fmt: skip


def commands(folder: Path) -> dict[str, list[str]]:
    """FAMILIES, with the models written below `folder`."""
    places = {}
    for name, config in MODELS.items():
        places[name] = folder / name
        places[name].mkdir()
        (places[name] / "config.json").write_text(json.dumps(config))
    return {name: [word.format(**places) for word in words] for name, words in FAMILIES.items()}
