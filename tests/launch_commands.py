"""Launch commands, with the configurations that kvgeom names, for the tests of `kvgeom plan`."""

from __future__ import annotations

import json
from pathlib import Path

MLA = ["--model-path", "deepseek-v3", "--tp-size", "8"]
GQA = ["--model-path", "llama-3.1-70b", "--tp-size", "8"]
EAGLE3 = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path"]
EAGLE3 += ["llama-3.1-70b-eagle3"]


def shape(steps: int, topk: int, draft_tokens: int) -> list[str]:
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    values = zip(names, (steps, topk, draft_tokens), strict=True)
    return [word for name, n in values for word in (f"--speculative-{name}", str(n))]


COMMANDS = {
    # An MHA draft shares a widened allocator of page 512, and indexes it raw.
    "mla dcp": [*MLA, "--dcp-size", "8", "--page-size", "64", *EAGLE3, *shape(3, 1, 4),
                "--context-length", "131072"],
    "mtp dcp": [*MLA, "--dcp-size", "8", "--page-size", "64", "--speculative-algorithm", "EAGLE",
                *shape(3, 1, 4)],
    "linear": ["--model-path", "kimi-linear-48b", "--tp-size", "8", "--trust-remote-code"],
    "chain fa3": [*GQA, *EAGLE3, *shape(3, 1, 4), "--context-length", "8192"],
    "plain": [*GQA],
    # SGLang's own parameters for Llama, at its own page of 1: 24 columns short.
    "tree page 1": [*GQA, *EAGLE3, *shape(5, 4, 8), "--attention-backend", "triton"],
    "tree page 16": [*GQA, *EAGLE3, *shape(5, 4, 8), "--attention-backend", "triton",
                     "--page-size", "16"],
    "tree fa3": [*GQA, *EAGLE3, *shape(5, 4, 8), "--attention-backend", "fa3",
                 "--context-length", "8192"],
    "standalone": [*GQA, "--speculative-algorithm", "STANDALONE",
                   "--speculative-draft-model-path", "llama-3.1-70b", "--page-size", "16",
                   "--context-length", "8192"],
    "ngram": [*GQA, "--speculative-algorithm", "NGRAM", "--page-size", "16",
              "--attention-backend", "flashinfer"],
    "capped": [*GQA, "--max-total-tokens", "65536"],
    "refused": [*MLA, "--dcp-size", "8", "--enable-hierarchical-cache",
                "--speculative-algorithm", "EAGLE", *shape(3, 1, 4)],
    "too much": [*GQA, "--mem-fraction-static", "0.05"],
    "typo": [*GQA, "--dpc-size", "8"],
    "no model": ["--model-path", "/nowhere"],
    "unified": ["--model-path", "kimi-linear-48b", "--tp-size", "8", "--trust-remote-code",
                "--enable-unified-memory"],
}  # fmt: skip

# Servers with no DCP and no draft.
PLAIN = {
    "MHA": "--model-path llama-3.1-70b --tp-size 8",
    "MLA": "--model-path deepseek-v3 --tp-size 8 --page-size 64",
    "DSA": "--model-path glm-5.2 --tp-size 8",
    "DSA, HiSparse": "--model-path glm-5.2 --tp-size 8 --enable-hisparse --disable-radix-cache",
    "hybrid linear": "--model-path kimi-linear-48b --tp-size 8 --trust-remote-code",
    "hybrid SWA": "--model-path gpt-oss-120b --tp-size 8",
}

# A draft of one layer that proposes a block of 7 at once.
BLOCK_DRAFT = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "block_size": 7,
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "mask_token_id": 129279,
    "num_target_layers": 61,
    "target_layer_ids": [0],
    "torch_dtype": "bfloat16",
}


def commands(folder: Path) -> dict[str, list[str]]:
    """COMMANDS, and those of models that are written below `folder`."""
    block, empty, unreadable = (folder / name for name in ("block", "empty", "unreadable"))
    for model in (block, empty, unreadable):
        model.mkdir()
    (block / "config.json").write_text(json.dumps(BLOCK_DRAFT))
    (unreadable / "config.json").write_text("{")
    return COMMANDS | {
        "block dcp": [*MLA, "--dcp-size", "8", "--page-size", "64", "--speculative-algorithm",
                      "DSPARK", "--speculative-draft-model-path", str(block)],
        "no config": ["--model-path", str(empty)],
        "unreadable": ["--model-path", str(unreadable)],
    }  # fmt: skip
