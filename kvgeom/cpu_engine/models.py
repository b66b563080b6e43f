"""The tiny models: random float32 weights, large enough that the output depends on the KV cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from kvgeom import caching

STD = 0.3  # below that, SGLang's own dummy weights give the same tokens whatever the cache holds
VOCAB, HIDDEN, HEADS = 128, 64, 8

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MQA = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "head_dim": HIDDEN // HEADS,
}
_MHA_DRAFT = {**_MQA, "num_key_value_heads": HEADS}
_MLA = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # Every layer is dense (first_k_dense_replace); the expert sizes only have to be there.
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "deepseek_yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
# Drafts `block_size` tokens at once from the hidden states that the first target layer gives;
# embedding and head are the target's.
_DSPARK_DRAFT = {
    **_MHA_DRAFT,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 3,
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "mask_token_id": VOCAB - 1,
    "num_target_layers": 2,
    "target_layer_ids": [0],
}
# Tensor cores take no heads of 8, and the MLA kernels only the published widths.
_CUDA_WIDTHS = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 64},
    "deepseek_v2": {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
# pair -> (target config, draft config, noise of the draft). A draft with the target's own weights
# plus noise is right often, but not always; None: a model of its own.
PAIRS = {"mqa": (_MQA, _MQA, 0.01), "mla": (_MLA, _MHA_DRAFT, None)}


def _attention_shapes(config: dict) -> dict[str, tuple[int, int]]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config["model_type"] != "deepseek_v2":
        dim, kv = config["head_dim"], config["num_key_value_heads"]
        return {
            "q_proj": (heads * dim, hidden),
            "k_proj": (kv * dim, hidden),
            "v_proj": (kv * dim, hidden),
            "o_proj": (hidden, heads * dim),
        }
    nope, rope, v = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        "q_a_proj": (q_rank, hidden),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + v), kv_rank),
        "o_proj": (hidden, heads * v),
    }


def _norms(config: dict) -> dict[str, int]:
    norms = {"input_layernorm": config["hidden_size"]}
    norms["post_attention_layernorm"] = config["hidden_size"]
    if config["model_type"] == "deepseek_v2":
        norms["self_attn.q_a_layernorm"] = config["q_lora_rank"]
        norms["self_attn.kv_a_layernorm"] = config["kv_lora_rank"]
    if config["model_type"] == "qwen3":
        norms["self_attn.q_norm"] = norms["self_attn.k_norm"] = config["head_dim"]
    return norms


def _weights(config: dict, seed: int, noise: float | None):
    """Weights by checkpoint name; with noise, the seed's own weights and a little of another."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    other = torch.Generator().manual_seed(seed + 1)

    def random(*shape: int):
        weight = torch.randn(*shape, generator=generator) * STD
        return weight + torch.randn(*shape, generator=other) * noise if noise else weight

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    vocab = config["vocab_size"]
    if "markov_rank" in config:
        rank, prefix = config["markov_rank"], ""
        weights = {
            "fc.weight": random(hidden, len(config["target_layer_ids"]) * hidden),
            "hidden_norm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden),
            "markov_head.markov_w1.weight": random(vocab, rank),
            "markov_head.markov_w2.weight": random(vocab, rank),
        }
    else:
        prefix = "model."
        weights = {
            "model.embed_tokens.weight": random(vocab, hidden),
            "lm_head.weight": random(vocab, hidden),
            "model.norm.weight": torch.ones(hidden),
        }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        for name, shape in _attention_shapes(config).items():
            weights[f"{at}self_attn.{name}.weight"] = random(*shape)
        for name, shape in mlp.items():
            weights[f"{at}mlp.{name}.weight"] = random(*shape)
        for name, size in _norms(config).items():
            weights[f"{at}{name}.weight"] = torch.ones(size)
    return weights


def _make(name: str, config: dict, seed: int, noise: float | None) -> Path:
    """The model's folder in the cache, written once and put in place by one rename."""
    from safetensors.torch import save_file

    recipe = json.dumps([config, seed, noise, STD], sort_keys=True).encode()
    folder = caching.folder("models") / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        (scratch / "config.json").write_text(json.dumps(config, indent=2))
        save_file(_weights(config, seed, noise), scratch / "model.safetensors", {"format": "pt"})
        scratch.rename(folder)
    except OSError:
        if not folder.exists():  # else another process made it first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def target_and_draft(
    pair: str, device: str = "cpu", algorithm: str = "STANDALONE"
) -> tuple[Path, Path]:
    """Folders of the pair's target and draft, made now where they are missing. Needs torch."""
    target, draft, noise = PAIRS[pair]
    name = f"{pair}-draft"
    if algorithm == "DSPARK":
        draft, noise, name = _DSPARK_DRAFT, None, f"{pair}-dspark"
    same = noise is not None
    if device == "cuda":
        target, draft = ({**c, **_CUDA_WIDTHS[c["model_type"]]} for c in (target, draft))
    return (
        _make(f"{pair}-target", target, 0, None),
        _make(name, draft, 0 if same else 7, noise),
    )
