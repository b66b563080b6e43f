"""Scenarios for draft pools and rows at their limits, written once for any client.

    full_load         the running requests take every page of the allocator
    context_limit     requests to the context length, several at once
    host_round_trip   a prompt is evicted to the host and comes back
    refused           what a server says that finds its draft pool too small

Each raises AssertionError, or returns the replies for the caller to look at.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Protocol

import requests

FULL_USAGE = 0.97
# Samples at FULL_USAGE that count as held; one alone could be a passing state.
HELD_SAMPLES = 3
WAVES = 2
POLL_SECONDS = 0.02

# For the source patcher: the draft pool is paged by the scheduled page again. The
# second edit is for the draft's own load: a function can be patched only once.
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
REVERT_DRAFT_PAGE = f"""
patches:
  - target: {_CONFIGURATOR}.pool_page_size.fget
    edits:
      - match: "@property"
        replacement: ""
      - match: return get_schedule().page_size if space is None else space.page_size
        replacement: return get_schedule().page_size
  - target: sglang.srt.debug_utils.dumper._Dumper.apply_source_patches
    edits:
      - match: "if not config_path:"
        replacement: "if True:"
"""

_MISMATCH = re.compile(
    r"DRAFT_POOL_PAGE_MISMATCH pool=(\d+) allocator=(\d+) "
    r"reaches=(\d+) valid_to=(\d+)"
)


class Client(Protocol):
    def generate(
        self, input_ids: list[list[int]], max_new_tokens: int
    ) -> list[dict[str, Any]]:
        """Greedy replies of /generate, in order; the requests are sent at once."""

    def server_info(self) -> dict[str, Any]:
        """What /server_info answers."""

    def token_usage(self) -> float:
        """Share of the KV tokens that running requests hold, 0 to 1."""


class HttpClient:
    """A running server."""

    def __init__(self, base_url: str, timeout: float = 1200):
        self.base_url = base_url
        self.timeout = timeout

    def generate(
        self, input_ids: list[list[int]], max_new_tokens: int
    ) -> list[dict[str, Any]]:
        sampling_params = {
            "max_new_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = requests.post(
            self.base_url + "/generate",
            json={"input_ids": input_ids, "sampling_params": sampling_params},
            timeout=self.timeout,
        )
        response.raise_for_status()
        return response.json()

    def server_info(self) -> dict[str, Any]:
        return self._get("/server_info")

    def token_usage(self) -> float:
        loads = self._get("/v1/loads?include=core")["loads"]
        return max((load["token_usage"] for load in loads), default=0.0)

    def _get(self, path: str) -> dict[str, Any]:
        response = requests.get(self.base_url + path, timeout=60)
        response.raise_for_status()
        return response.json()


def revert_draft_page_env(config_path: str) -> dict[str, str]:
    """Environment of a server that patches itself with the file's content."""
    return {
        "DUMPER_ENABLE": "1",
        "DUMPER_NON_INTRUSIVE_MODE": "off",
        "DUMPER_SOURCE_PATCHER_CONFIG": config_path,
    }


def refused(log: str, *, page_size: int, dcp_size: int) -> None:
    """The log names the pages of pool and allocator, and the rows between them."""
    found = _MISMATCH.search(log)
    assert found, f"no DRAFT_POOL_PAGE_MISMATCH in: {log[-2000:]}"
    pool, allocator, reaches, valid_to = map(int, found.groups())
    assert (pool, allocator) == (page_size, page_size * dcp_size), found[0]
    assert reaches - valid_to == allocator - pool, found[0]


def full_load(client: Client) -> list[dict[str, Any]]:
    """WAVES times the most running requests, which fill the pool exactly."""
    info = client.server_info()
    page_size = alloc_page_size(info)
    capacity, scheduled = info["max_total_num_tokens"], info["max_total_tokens"]
    assert scheduled is None or capacity == scheduled * info["dcp_size"], (
        f"{capacity} tokens for --max-total-tokens {scheduled}"
    )
    new_tokens = page_size // 4
    prompts = full_load_prompts(
        capacity=capacity,
        page_size=page_size,
        requests_at_once=info["max_running_requests"],
    )
    with _sampled_usage(client) as samples:
        replies = client.generate(prompts, new_tokens)
    check_complete(replies, prompts, new_tokens)
    held = [usage for usage in samples if usage >= FULL_USAGE]
    assert len(held) >= HELD_SAMPLES, (
        f"token usage was {FULL_USAGE} in {len(held)} of {len(samples)} samples, "
        f"at most {max(samples, default=0.0):.3f}"
    )
    check_idle(client)
    return replies


def full_load_prompts(
    *, capacity: int, page_size: int, requests_at_once: int
) -> list[list[int]]:
    """Prompts that end one token before a page; the first decode takes the next one.

    With that page, the requests of one wave hold all pages of the allocator.
    """
    each, left = divmod(capacity // page_size, requests_at_once)
    assert each > 1, f"{capacity} tokens for {requests_at_once} requests: no two pages"
    lengths = [
        (each + (number < left) - 1) * page_size - 1
        for number in range(requests_at_once)
    ]
    return [prompt(number, length) for number, length in enumerate(lengths * WAVES)]


def context_limit(client: Client) -> list[dict[str, Any]]:
    """As many requests as run at once, each as long as the context allows."""
    info = client.server_info()
    context_length = info["context_length"]
    new_tokens = min(64, context_length // 3)
    prompts = [
        prompt(number, context_length - new_tokens)
        for number in range(info["max_running_requests"])
    ]
    alone = [reply for ids in prompts for reply in client.generate([ids], new_tokens)]
    together = client.generate(prompts, new_tokens)
    # The scheduler ends a request two tokens before the context length.
    for replies in (alone, together):
        check_complete(replies, prompts, new_tokens - 2)
    for number, (one, other) in enumerate(zip(alone, together)):
        check_same_tokens(f"request {number}", other, one)
    check_idle(client)
    return together


def host_round_trip(client: Client) -> list[dict[str, Any]]:
    """A prompt of two pages, twice; enough others to evict it; the prompt again."""
    info = client.server_info()
    page_size = alloc_page_size(info)
    length, new_tokens = 2 * page_size + page_size // 8, page_size // 32
    fillers = info["max_total_num_tokens"] // (2 * page_size)

    def ask(number: int, new_tokens: int) -> dict[str, Any]:
        ids = prompt(number, length)
        replies = client.generate([ids], new_tokens)
        check_complete(replies, [ids], new_tokens)
        return replies[0]

    first, from_device = ask(0, new_tokens), ask(0, new_tokens)
    for number in range(1, fillers + 1):
        ask(number, 1)
    from_host = ask(0, new_tokens)
    sources = [_cached_tokens(reply) for reply in (first, from_device, from_host)]
    expected = [
        None,
        {"device": 2 * page_size, "host": 0},
        {"device": 0, "host": 2 * page_size},
    ]
    assert sources == expected, f"cached tokens: {sources}, not {expected}"
    check_same_tokens("the prompt from the host", from_host, from_device)
    # Draft rows that came back wrong leave the tokens right and draft worse.
    accepted = [
        reply["meta_info"].get("spec_accept_length")
        for reply in (from_device, from_host)
    ]
    assert accepted[0] == accepted[1], f"accept length {accepted[1]}, was {accepted[0]}"
    check_idle(client)
    return [first, from_device, from_host]


def _cached_tokens(reply: dict[str, Any]) -> Optional[dict[str, int]]:
    details = reply["meta_info"].get("cached_tokens_details")
    return details and {source: details[source] for source in ("device", "host")}


def alloc_page_size(info: dict[str, Any]) -> int:
    """The page of a plain allocator, which widens under DCP."""
    return info["page_size"] * info["dcp_size"]


def prompt(number: int, length: int) -> list[int]:
    """Token ids from 3 to 122; no two of the first 120 share their first token."""
    return [
        3 + (7 * i + i // 120 * (5 + number) + 31 * number) % 120 for i in range(length)
    ]


def check_complete(
    replies: list[dict[str, Any]], prompts: list[list[int]], new_tokens: int
) -> None:
    assert len(replies) == len(prompts), f"{len(replies)} of {len(prompts)} replies"
    for number, reply in enumerate(replies):
        reason = reply["meta_info"]["finish_reason"]
        assert reason["type"] == "length", f"request {number} ended with {reason}"
        count = len(reply["output_ids"])
        assert count == new_tokens, f"request {number}: {count} of {new_tokens} tokens"


def check_same_tokens(what: str, reply: dict[str, Any], other: dict[str, Any]) -> None:
    got, expected = reply["output_ids"], other["output_ids"]
    assert got == expected, f"{what}: {got}, not {expected}"


def check_idle(client: Client) -> None:
    """The idle memory check ends a server that lost tokens or rows."""
    for _ in range(2):
        time.sleep(0.5)
        client.server_info()


@contextmanager
def _sampled_usage(client: Client) -> Iterator[list[float]]:
    """Token usage, sampled by another thread while the block runs."""
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(POLL_SECONDS):
            samples.append(client.token_usage())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
