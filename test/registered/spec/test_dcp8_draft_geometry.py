"""Draft pools on 8 GPUs, TP8 x DCP8: full, refused when narrow, evicted to the host.

The tree draft runs at DCP 1: no attention backend verifies a tree under DCP. The MLA
backend that verifies a chain under DCP is CuTe DSL, which needs Blackwell.
"""

import json
import os
import shutil
import tempfile
import unittest
from typing import Any, Optional

from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits import dcp_draft_geometry_kit as kit
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.test_utils import (
    DEFAULT_DRAFT_MODEL_EAGLE3,
    DEFAULT_TARGET_MODEL_EAGLE3,
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
    DEFAULT_URL_FOR_TEST,
    CustomTestCase,
    popen_launch_server,
)

register_cuda_ci(est_time=2400, stage="extra-b", runner_config="8-gpu-b200")

DCP_SIZE = 8
PAGE_SIZE = 64


def dspark_draft(
    *, hidden_size: int, vocab_size: int, target_layers: int
) -> dict[str, Any]:
    """Config of a DSPARK draft, which is loaded with dummy weights."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "mask_token_id": vocab_size - 1,
        "block_size": 7,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "num_target_layers": target_layers,
        "target_layer_ids": [1, target_layers // 2, target_layers - 2],
    }


class DraftServerBase(CustomTestCase):
    """A server with a draft, launched for the class unless `runs` is False."""

    model: str
    args: tuple[str, ...]
    draft_model: Optional[str] = None
    draft_config: Optional[dict[str, Any]] = None
    base_url = DEFAULT_URL_FOR_TEST
    runs = True

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.process = None
        if cls.runs:
            cls.process = cls.launch()
            cls.client = kit.HttpClient(cls.base_url)

    @classmethod
    def tearDownClass(cls):
        if cls.process is not None:
            kill_process_tree(cls.process.pid, wait_timeout=60)
        shutil.rmtree(cls.folder)

    @classmethod
    def launch(cls, **kwargs):
        return popen_launch_server(
            cls.model,
            cls.base_url,
            timeout=DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH * 8,
            other_args=cls.server_args(cls.folder),
            **kwargs,
        )

    @classmethod
    def server_args(cls, folder: str) -> list[str]:
        """Arguments of the launch; a draft's config is written to the folder."""
        args = ["--tp-size", "8", "--trust-remote-code", *cls.args]
        args += ["--load-snapshot-publish-interval", "1"]
        draft = cls.draft_model
        if cls.draft_config is not None:
            draft = folder
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(cls.draft_config, file)
            args += ["--speculative-draft-load-format", "dummy"]
        if draft is not None:
            args += ["--speculative-draft-model-path", draft]
        return args


DCP8_ARGS = (
    "--dcp-size",
    str(DCP_SIZE),
    "--dcp-comm-backend",
    "a2a",
    "--page-size",
    str(PAGE_SIZE),
    "--attention-backend",
    "cutedsl_mla",
    "--speculative-attention-mode",
    "decode",
    "--cuda-graph-backend-prefill",
    "disabled",
    "--context-length",
    "16384",
    "--mem-fraction-static",
    "0.80",
)
# 256 pages of the allocator: eight for each of 32 requests.
FULL_LOAD_ARGS = ("--max-total-tokens", "16384", "--max-running-requests", "32")
DSPARK_ARGS = (
    "--speculative-algorithm",
    "DSPARK",
    "--speculative-draft-attention-backend",
    "trtllm_mha",
    "--dtype",
    "bfloat16",
)


class KimiLinearDSpark:
    model = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
    args = (
        *DCP8_ARGS,
        *FULL_LOAD_ARGS,
        *DSPARK_ARGS,
        "--kv-cache-dtype",
        "fp8_e4m3",
    )
    draft_config = dspark_draft(hidden_size=2304, vocab_size=163840, target_layers=27)
    gsm8k_score_threshold = 0.88


class DeepSeekEagle:
    # The checkpoint's own next-token layer is the draft.
    model = "deepseek-ai/DeepSeek-V3.1"
    args = (
        *DCP8_ARGS,
        *FULL_LOAD_ARGS,
        "--speculative-algorithm",
        "EAGLE",
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "4",
    )
    gsm8k_score_threshold = 0.90


class FullLoadMixin(GSM8KMixin):
    def test_every_page_in_use(self):
        kit.full_load(self.client)


class RefusedMixin:
    runs = False

    def test_a_draft_paged_as_scheduled_does_not_boot(self):
        config = os.path.join(self.folder, "revert.yaml")
        with open(config, "w") as file:
            file.write(kit.REVERT_DRAFT_PAGE)
        with open(os.path.join(self.folder, "log"), "w+") as log:
            with self.assertRaisesRegex(Exception, "exited"):
                process = self.launch(
                    env=kit.revert_draft_page_env(config),
                    return_stdout_stderr=(log, log),
                )
                kill_process_tree(process.pid, wait_timeout=60)
            log.seek(0)
            kit.refused(log.read(), page_size=PAGE_SIZE, dcp_size=DCP_SIZE)


class TestKimiLinearDSpark(KimiLinearDSpark, FullLoadMixin, DraftServerBase):
    pass


class TestKimiLinearDSparkRefused(KimiLinearDSpark, RefusedMixin, DraftServerBase):
    pass


class TestDeepSeekEagle(DeepSeekEagle, FullLoadMixin, DraftServerBase):
    pass


class TestDeepSeekEagleRefused(DeepSeekEagle, RefusedMixin, DraftServerBase):
    pass


class TestDSparkHostRoundTrip(DraftServerBase):
    model = "moonshotai/Moonlight-16B-A3B-Instruct"
    args = (
        *DCP8_ARGS,
        *DSPARK_ARGS,
        "--max-total-tokens",
        "4096",
        "--max-running-requests",
        "4",
        "--enable-hierarchical-cache",
        "--hicache-ratio",
        "2",
    )
    draft_config = dspark_draft(hidden_size=2048, vocab_size=163840, target_layers=27)

    def test_evicted_prompt_comes_back(self):
        kit.host_round_trip(self.client)


class TestTreeDraftAtContextLimit(DraftServerBase):
    model = DEFAULT_TARGET_MODEL_EAGLE3
    draft_model = DEFAULT_DRAFT_MODEL_EAGLE3
    # Equal tokens at any batch size need batch-invariant kernels and no cached prefix.
    args = (
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-num-steps",
        "5",
        "--speculative-eagle-topk",
        "4",
        "--speculative-num-draft-tokens",
        "8",
        "--page-size",
        "1",
        "--attention-backend",
        "triton",
        "--enable-deterministic-inference",
        "--disable-radix-cache",
        "--context-length",
        "1024",
        "--max-running-requests",
        "8",
        "--dtype",
        "bfloat16",
    )

    def test_several_at_once_as_one_at_a_time(self):
        kit.context_limit(self.client)


if __name__ == "__main__":
    unittest.main()
