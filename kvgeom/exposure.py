"""Which fault of the series a server's launch arguments reach on an unpatched release.

A fault counts where series.toml says that the PR's tests are red on the release, and where SGLang's
own code has no fix in it. What a fault needs is here: sizes are those that SGLang works out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvgeom.launch import Launch


class Grade(StrEnum):
    HIT = "hits"
    MODEL = "depends on the model"  # of which the arguments say nothing
    MEMORY = "memory only"


@dataclass(frozen=True)
class Finding:
    """One fault, the PR of the series that fixes it, and what a user would see."""

    pr: str
    grade: Grade
    text: str


# Backends whose tables follow the context length in every release (the edits of attention-tables);
# others, such as dsa and dsv4, read the width of the req_to_token row.
_NARROW = {
    *("triton", "fa3", "fa4", "flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla"),
    *("tokenspeed_mla", "trtllm_mha", "aiter", "wave", "intel_xpu", "ascend", "qsa"),
}
# The edits that a release has where it has the fault: its index keys are replicated, and a
# sliding-window draft has a host pool that follows another.
_INDEX_KEYS = ("python/sglang/srt/mem_cache/pool_host/dsa.py", "row-slots")
_WINDOW_DRAFT = (
    "python/sglang/srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py",
    "swa-ratio",
)
# And of one that charges a sparse-attention (DSA) model's own draft all of its rows.
_DSA_CHARGE = ("python/sglang/srt/model_executor/pool_configurator.py", "index-keys")
# And of one whose budget charges a sliding-window target for one DCP rank's KV heads.
_TARGET_HEADS = ("python/sglang/srt/model_executor/pool_configurator.py", "swa-target-heads")
# Backends for models whose KV is latent (MLA), so neither sliding-window nor MiniMax ones.
_MLA_ONLY = {"dsa", "nsa", "dsv4", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"}
# Drafts that SGLang charges one row a token, whatever the DCP factor. The two names are one draft.
_ONE_ROW = {"EAGLE", "NEXTN", "EAGLE3", "STANDALONE"}
_OWN_LAYER = {"EAGLE", "NEXTN"}
# A draft of these has no KV pool of its own.
_NO_DRAFT_POOL = {"NGRAM", "UNO"}
# steps / topk / draft tokens where none is given; EAGLE's are those of Llama, the largest.
_DEFAULT_SHAPES = {"DFLASH": (1, 1, 16), "DSPARK": (1, 1, 8), "NGRAM": (1, 10, 12)}
_DEFAULT_SHAPES["STANDALONE"] = (3, 1, 4)
_EAGLE_SHAPE = (5, 4, 8)


def findings(
    launch: Launch, open_prs: set[str], edits: set[tuple[str, str]], *, headroom_is_widened: bool
) -> list[Finding]:
    """`open_prs`: the PRs whose fault this SGLang has; `edits`: (file, id) of those for it.

    `headroom_is_widened`: whether its row headroom counts the page with the DCP factor in it.
    """
    rules: dict[str, Callable[[], Finding | None]] = {
        "draft-pool-page": lambda: _draft_pool(launch),
        "req-rows": lambda: _rows(launch, headroom_is_widened),
        "attention-tables": lambda: _tables(launch),
        "draft-host-pool": lambda: _host_pool(launch, edits),
        "dspark-hicache": lambda: _dspark(launch),
        "draft-budget": lambda: _budget(launch, edits),
    }
    found = [rule() for pr, rule in rules.items() if pr in open_prs]
    return [f for f in found if f]


def shape(launch: Launch) -> tuple[int, int, int]:
    """steps, topk, draft tokens; SGLang's defaults where none is given."""
    steps, topk, tokens = _DEFAULT_SHAPES.get(launch.algorithm, _EAGLE_SHAPE)
    if launch.steps is None and launch.topk is None and launch.draft_tokens is None:
        return steps, topk, tokens
    topk = launch.topk or (10 if launch.algorithm == "NGRAM" else 1)
    steps = launch.steps or 1
    return steps, topk, launch.draft_tokens or steps + 1  # a chain drafts one token a step


def entries_past_row(launch: Launch, headroom_is_widened: bool) -> int:
    """Entries that one decode step at the context limit writes past its req_to_token row."""
    tokens = shape(launch)[2]
    page = (launch.page or 1) * launch.dcp
    headroom = 4 + tokens
    if not launch.unified:
        counted = page if headroom_is_widened else launch.page or 1
        if counted > 1 or launch.algorithm == "UNO":
            headroom = max(headroom, _reserve(launch, counted) + counted - 1)
    reserve = _reserve(launch, page if headroom_is_widened else launch.page or 1)
    # The scheduler lets a request commit 4 tokens less than the context before it decodes again.
    context = launch.context or page
    end = -(-(context - 4 + reserve) // page) * page
    return max(0, end - context - headroom)


def _reserve(launch: Launch, page: int) -> int:
    """What a decode step allocates, twice: for overlap scheduling."""
    steps, topk, tokens = shape(launch)
    if launch.algorithm == "UNO":
        return 2 * (tokens + 1)
    if page == 1 or topk == 1 or launch.algorithm == "NGRAM":
        return 2 * max(steps * topk, tokens)
    pages_a_branch = (page - 1 + steps + page - 1) // page
    return 2 * max(pages_a_branch * page * topk, tokens)


def _rows(launch: Launch, headroom_is_widened: bool) -> Finding | None:
    past = entries_past_row(launch, headroom_is_widened) if launch.algorithm else 0
    if not past:
        return None
    assumed = launch.steps is None and launch.draft_tokens is None
    where = " on a model with Mamba layers" if launch.unified else ""
    eagle = assumed and launch.algorithm not in _DEFAULT_SHAPES
    where += " with SGLang's draft sizes for Llama, 5/4/8" if eagle else ""
    text = (
        f"a request at the context limit{where} writes {past} entries into the next request's row "
        "of req_to_token and loses as many KV slots"
    )
    return Finding("req-rows", Grade.MODEL if where else Grade.HIT, text)


def _tables(launch: Launch) -> Finding | None:
    if not launch.algorithm:
        return None
    narrow = [b for b in launch.backends if b in _NARROW]
    if launch.backends and not narrow:
        return None
    backend = f"attention backend {narrow[0]}" if narrow else "the attention backend SGLang chose"
    text = (
        f"the tables of {backend} end at the context length, a sequence with drafted tokens does "
        "not: near the limit wrong attention, a write past a buffer or an end of the server"
    )
    if not narrow:
        text += " (not with dsa and dsv4, for example)"
    return Finding("attention-tables", Grade.HIT if narrow else Grade.MODEL, text)


def _draft_pool(launch: Launch) -> Finding | None:
    if launch.dcp == 1 or not launch.algorithm or launch.algorithm in _NO_DRAFT_POOL:
        return None
    text = (
        f"the draft pool's page is worked out from --dcp-size {launch.dcp}, not read from the "
        "allocator: right for the plain one, "
        f"{launch.dcp} times too large beside a sliding-window or HiSparse one"
    )
    return Finding("draft-pool-page", Grade.MEMORY, text)


def _host_pool(launch: Launch, edits: set[tuple[str, str]]) -> Finding | None:
    if launch.dcp == 1 or not launch.hicache:
        return None
    dsa = {"dsa", "nsa"} & {*launch.backends}
    short = []
    if _INDEX_KEYS in edits:
        whose = "the model's" if dsa else "a sparse-attention (DSA) model's"
        short.append(f"the host copy of {whose} index keys")
    if _WINDOW_DRAFT in edits and launch.algorithm and launch.algorithm not in _NO_DRAFT_POOL:
        short.append("the host pool of a sliding-window draft")
    if not short:
        return None
    text = (
        f"{' and '.join(short)} has 1/{launch.dcp} of the rows that HiCache hands out slots for; "
        "the rest is copied past it"
    )
    certain = dsa and _INDEX_KEYS in edits
    return Finding("draft-host-pool", Grade.HIT if certain else Grade.MODEL, text)


def _dspark(launch: Launch) -> Finding | None:
    if launch.dcp == 1 or not launch.hicache or launch.algorithm != "DSPARK":
        return None
    text = "SGLang refuses to start HiCache and DSPARK with --dcp-size > 1"
    return Finding("dspark-hicache", Grade.HIT, text)


def _budget(launch: Launch, edits: set[tuple[str, str]]) -> Finding | None:
    if launch.dcp == 1:
        return None
    more = [text for text in (_draft_charge(launch, edits), _target_charge(launch, edits)) if text]
    if not more:
        return None
    text = (
        f"{'; '.join(more)}: pools take more GPU memory than budgeted, and the server ends without "
        "memory at boot or under load"
    )
    return Finding("draft-budget", Grade.MODEL, text)


def _draft_charge(launch: Launch, edits: set[tuple[str, str]]) -> str:
    """What is said of a draft that is charged less than it takes; "" where there is none."""
    if launch.algorithm not in _ONE_ROW:
        return ""
    dsa = {"dsa", "nsa"} & {*launch.backends}
    if dsa and launch.algorithm in _OWN_LAYER and _DSA_CHARGE in edits:
        return ""
    return (
        f"the draft's pool has {launch.dcp} rows for a token of the KV budget, which charges one, "
        "where they outweigh a layer of the model"
    )


def _target_charge(launch: Launch, edits: set[tuple[str, str]]) -> str:
    """The same of the target, which needs no draft. SGLang refuses HiCache and unified memory with
    DCP for the models that it is about."""
    other_model = {*launch.backends} & _MLA_ONLY or launch.hicache or launch.unified
    if other_model or _TARGET_HEADS not in edits:
        return ""
    return (
        "a sliding-window or MiniMax model's own pools hold the KV heads of all "
        f"{launch.dcp} DCP ranks, and the KV budget charges one rank's"
    )
