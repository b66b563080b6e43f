"""The scenarios of the 8-GPU tests by themselves, and a client that does everything right."""

from __future__ import annotations

import importlib.util
import threading
import types

from conftest import REPOSITORY

KIT = REPOSITORY / "python/sglang/test/kits/dcp_draft_geometry_kit.py"


def _load_kit():
    """It imports nothing of SGLang's. Its pauses, which let a server idle, are left out."""
    spec = importlib.util.spec_from_file_location(KIT.stem, KIT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.time = types.SimpleNamespace(sleep=lambda seconds: None)
    return module


kit = _load_kit()


class FakeClient:
    """A server that does everything right, but for what a test overrides."""

    def __init__(self, **info):
        self.info = {
            "page_size": 4, "dcp_size": 8, "max_total_num_tokens": 256, "max_total_tokens": 32,
            "max_running_requests": 2, "context_length": 512, **info,
        }  # fmt: skip
        self.usage, self.batches, self.change = 1.0, [], lambda number, reply: None

    def server_info(self) -> dict:
        return self.info

    def token_usage(self) -> float:
        return self.usage

    def generate(self, input_ids: list[list[int]], max_new_tokens: int) -> list[dict]:
        if len(input_ids) > 1:
            threading.Event().wait(0.2)  # for a few samples of the usage
        self.batches.append(input_ids)
        replies = [self.reply(ids, max_new_tokens) for ids in input_ids]
        for number, reply in enumerate(replies):
            self.change(number, reply)
        return replies

    def reply(self, ids: list[int], new_tokens: int) -> dict:
        new_tokens = min(new_tokens, self.info["context_length"] - 2 - len(ids))
        return {
            "output_ids": [sum(ids) % 97 + i for i in range(new_tokens)],
            "meta_info": {
                "finish_reason": {"type": "length"},
                "spec_accept_length": 2.0,
                "cached_tokens_details": self.cached(ids),
            },
        }

    def cached(self, ids: list[int]) -> dict | None:
        """As a cache with a host: a prompt of two pages lies there once others filled the pool."""
        page = self.info["page_size"] * self.info["dcp_size"]
        asked = [batch[0][:page] for batch in self.batches]
        if asked.count(ids[:page]) == 1:
            return None
        source = "host" if len(asked) > 2 else "device"
        return {"device": 0, "host": 0, source: 2 * page}


def said(scenario: str, client) -> str:
    """What the scenario finds wrong, or nothing."""
    try:
        getattr(kit, scenario)(client)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""
