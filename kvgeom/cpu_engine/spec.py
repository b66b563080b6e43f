"""What to run on the CPU engine, and what a run reports. Plain data, JSON in both directions."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field

FAULTS = ("draft-page", "no-assertion", "draft-host-pool", "draft-load-back")
ALGORITHMS = ("STANDALONE", "DSPARK")
DEVICES = ("cpu", "cuda")  # cuda has never been run


class EngineSetupError(RuntimeError):
    """The engine could not be prepared: no sglang, an unknown release, a gate that does not fit."""


class _Json:
    """`to_json` / `from_json` for a tree of dataclasses, tuples, lists and plain values."""

    @classmethod
    def from_json(cls, text: str):
        """Back from `to_json`. ValueError for text that is no JSON and for unknown fields."""
        return decode(cls, json.loads(text))

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self))


def decode(kind, value):
    """Build `kind` (a dataclass, list[...], tuple[...], X | None or plain type) from JSON data."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if value is None:
        return None
    if origin in (types.UnionType, typing.Union):
        return decode(next(a for a in args if a is not type(None)), value)
    if origin is list:
        return [decode(args[0], item) for item in value]
    if origin is tuple:
        return tuple(decode(args[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
        return kind(**{name: decode(hints[name], item) for name, item in value.items()})
    return value


@dataclass(frozen=True)
class EngineSpec(_Json):
    """One engine to boot and the requests to send it.

    `scenario` names a function of the tree's `dcp_draft_geometry_kit`, run instead of the prompts.

    `page`, `context`, `max_total_tokens` (scheduled tokens per rank), `max_running` and `prompts`
    default to the pair's own values (`resolved`). With the defaults the requests fill the
    allocator to its last page. `in_turn` sends a prompt when the one before has been answered;
    `hicache` keeps evicted pages in host pools, twice the size of the device pools. `algorithm`
    DSPARK drafts for pair mla, a block of 3 at once (so `draft_tokens` is 4), without `steps` and
    `topk`; it is the one that SGLang admits with hicache at dcp > 1.
    """

    pair: str = "mqa"
    tp: int = 8
    dcp: int = 8
    draft: bool = True
    algorithm: str = "STANDALONE"
    page: int | None = None
    steps: int = 3
    topk: int = 1
    draft_tokens: int = 4
    context: int | None = None
    max_total_tokens: int | None = None
    max_running: int | None = None
    bounds: bool = False
    faults: tuple[str, ...] = ()
    prompts: tuple[tuple[int, ...], ...] | None = None
    max_new_tokens: int | None = None
    in_turn: bool = False
    hicache: bool = False
    scenario: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.pair not in PAIR_DEFAULTS:
            raise ValueError(f"pair {self.pair!r}: choose one of {', '.join(PAIR_DEFAULTS)}")
        if self.tp < 1 or self.dcp < 1 or self.tp % self.dcp:
            raise ValueError(f"tp {self.tp} must be a positive multiple of dcp {self.dcp}")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {self.algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
        if self.algorithm == "DSPARK" and self.pair != "mla":
            raise ValueError(f"algorithm DSPARK drafts for pair mla, not {self.pair}")
        if self.device not in DEVICES:
            raise ValueError(f"device {self.device!r}: choose one of {', '.join(DEVICES)}")
        unknown = sorted(set(self.faults) - set(FAULTS))
        if unknown:
            raise ValueError(f"fault {', '.join(unknown)}: choose from {', '.join(FAULTS)}")

    def resolved(self) -> EngineSpec:
        """The same spec with every default of the pair filled in."""
        own = PAIR_DEFAULTS[self.pair]
        # The loc space of one engine is max_total_tokens * dcp: a control run gets it all.
        total = own["max_total_tokens"] * 8 // self.dcp
        defaults = {**own, "max_total_tokens": total}
        missing = {k: v for k, v in defaults.items() if getattr(self, k) is None}
        return dataclasses.replace(self, **missing)


def _prompts(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Distinct token sequences, ids 3 to 122 of a vocabulary of 128."""
    return tuple(
        tuple((i * (7 + 2 * n) + 11 * n) % 120 + 3 for i in range(length))
        for n, length in enumerate(lengths)
    )


PAIR_DEFAULTS = {
    "mqa": {
        "page": 4,
        "context": 512,
        "max_total_tokens": 32,
        "max_running": 4,
        # Pages of 32: 4 + 3 of 8; decoding takes the first request into the last page.
        "prompts": _prompts((126, 80)),
        "max_new_tokens": 8,
    },
    "mla": {
        "page": 32,
        "context": 2048,
        "max_total_tokens": 96,
        "max_running": 4,
        # Pages of 256: 1 + 1 of 3; decoding takes the first request into the last page.
        "prompts": _prompts((254, 240)),
        "max_new_tokens": 5,
    },
}


@dataclass(frozen=True)
class AllocatorGeometry:
    """`token_to_kv_pool_allocator`: it hands out locs in [page_size, size + page_size)."""

    cls: str
    size: int
    page_size: int


@dataclass(frozen=True)
class PoolGeometry:
    """A KV pool. `rows` is buffer.shape[0]; a loc is divided by `dcp_size` before it indexes."""

    cls: str
    size: int
    page_size: int
    rows: int
    indexed: str  # "raw" | "translated"
    dcp_size: int


@dataclass(frozen=True)
class ReqToTokenGeometry:
    """`req_to_token`: one row of `width` locs a request, rows counted with the padding row."""

    rows: int
    width: int
    context_len: int


@dataclass(frozen=True)
class HostPoolGeometry:
    """A HiCache host pool: `logical_size` spans the loc space, `size` this rank's rows."""

    size: int
    logical_size: int
    page_size: int


@dataclass(frozen=True)
class RankGeometry(_Json):
    """What one rank built, read from its live objects after boot."""

    rank: int
    dcp_rank: int
    dcp_size: int
    allocator: AllocatorGeometry
    target: PoolGeometry
    draft: PoolGeometry | None
    req_to_token: ReqToTokenGeometry
    draft_shares_allocator: bool
    host: HostPoolGeometry | None = None
    draft_host: HostPoolGeometry | None = None


@dataclass(frozen=True)
class Violation:
    """One out-of-bounds write, stopped before it was made.

    For a pool, `index` is the first row past the end and `limit` the rows it has. For
    req_to_token, `row` is the request's row, [start, end) the columns, `limit` the row's width and
    `index` the row that the write would spill into. For a Triton kernel, `cls` is its name, `index`
    the element past the end of the buffer that it was given, and `limit` that buffer's elements.
    """

    rank: int
    structure: str  # "target" | "draft" | "target host" | "draft host" | "req_to_token" | "kernel"
    cls: str
    index: int
    limit: int
    loc: int | None = None
    allocator_page: int | None = None
    row: int | None = None
    start: int | None = None
    end: int | None = None
    message: str = ""


@dataclass(frozen=True)
class EngineError:
    """Why the engine stopped. `rank` is None where no rank said so itself."""

    stage: str  # "boot" | "serve"
    type: str
    message: str
    rank: int | None = None
    traceback: str = ""


@dataclass
class EngineReport(_Json):
    """Everything one run showed.

    `drafted`: the blocks that a DSPARK draft proposed, by prompt and round. `draft_rows`: a digest
    of the draft's cache rows of the prompt's whole allocator pages, taken with `hicache` when its
    request was finished, by prompt and rank.

    `idle_ranks` passed SGLang's idle memory check after the last request.

    `host_rows`: rows that rank 0 copied between device and host pools, a row once per buffer, by
    pool and direction: "target out", "target back", "draft out", "draft back".
    """

    spec: EngineSpec
    release: str = ""
    geometry: list[RankGeometry] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    accept_lengths: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    drafted: list[list[list[int]]] = field(default_factory=list)
    draft_rows: list[list[str]] = field(default_factory=list)
    peak_token_usage: float = 0.0
    max_req_to_token_end: int = 0
    idle_ranks: list[int] = field(default_factory=list)
    host_rows: dict[str, int] = field(default_factory=dict)
    error: EngineError | None = None
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    peak_rss_mb: int = 0

    @property
    def ok(self) -> bool:
        return self.error is None and not self.violations
