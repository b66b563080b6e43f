"""What to plan, and what one SGLang tree made of it. Plain data, JSON in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvgeom.cpu_engine.spec import AllocatorGeometry, ReqToTokenGeometry


class GpuArch(StrEnum):
    """The GPU that SGLang is told of: its default backends depend on it."""

    SM90 = "sm90"
    SM100 = "sm100"


GPU_MEMORY, GPU_ARCH = 141.0, GpuArch.SM90  # GiB; an H200


@dataclass(frozen=True)
class Request:
    """One launch command. Memory is GiB of one GPU; `weights` is what weights take of it.

    `capacity`: only how many tokens fit and what they take, which more servers can be asked for.
    """

    arguments: list[str]
    gpu_memory: float
    gpu_arch: str
    weights: float
    capacity: bool = False


@dataclass(frozen=True)
class Stop:
    """What ended the plan. `by`: "arguments" (SGLang's parser), "sglang" (its validation or a
    constructor), "assertion" (a boot assertion of the series), "kvgeom" (a plan does not cover it).
    """

    by: str
    type: str
    message: str


@dataclass(frozen=True)
class RowUse:
    """How far decode steps write into a req_to_token row. Counts are tokens.

    `ends_at`: where the real prepare of a decode step ends the KV of a request that has committed
    `committed`, the most that one which decodes again can have. `overruns_from`: the first
    committed length whose end lies past the row; None where there is none. Without speculation
    both are the context length, where a request ends.
    """

    committed: int
    reserve: int
    ends_at: int
    overruns_from: int | None = None


@dataclass(frozen=True)
class Server:
    """What the tables of attention backends follow from. `row`: the width of a req_to_token row;
    `page`: the scheduled page; `window`: whether the target has sliding windows; `target`, `draft`:
    backends, by SGLang's names."""

    algorithm: str
    steps: int
    topk: int
    draft_tokens: int
    context: int
    row: int
    page: int
    dcp_size: int
    mla: bool
    window: bool
    multi_layer: bool
    target: str
    draft: str


HOST_SLOT = "host slot"


@dataclass(frozen=True)
class Pool:
    """Rows that ids index on one GPU: a KV pool, index keys, a table of locs, a host pool.

    `ids` is what they are ("loc", "window id", ...): `space` of them in pages of `space_page`, of
    which the lowest page is never handed out. `ids_per_row` of them share a row. `rows` is
    shape[0] of a buffer, times the page where a buffer's row is one; of a host pool its `size`.
    `why` is told with a fault.
    """

    name: str
    cls: str
    size: int
    page_size: int
    rows: int
    ids: str
    space: int
    space_page: int
    ids_per_row: int = 1
    why: str = ""

    @property
    def reach(self) -> int:
        """The first row that is never used."""
        return -(-(self.space + self.space_page) // self.ids_per_row)


@dataclass(frozen=True)
class Geometry:
    """What rank 0 built. `draft_shares_allocator`: None without a draft."""

    dcp_size: int
    allocator: AllocatorGeometry
    pools: list[Pool]
    req_to_token: ReqToTokenGeometry
    draft_shares_allocator: bool | None = None

    def pool(self, name: str) -> Pool | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)


@dataclass(frozen=True)
class Table:
    """A table of an attention backend, in tokens of one request: how many of them `columns` has,
    and `ends_at`, how many the longest sequence has."""

    name: str
    columns: int
    ends_at: int


@dataclass(frozen=True)
class PoolBuffers:
    """A pool that holds tensors, of "target" or "draft", and `size`, its bytes. Each kind of buffer
    is `[attribute, count, shape, dtype]`."""

    owner: str
    cls: str
    size: int
    buffers: list[list]


@dataclass(frozen=True)
class Capacity:
    """KV of one GPU. `charged`: bytes that SGLang's budget takes for a token; `kv`: what they pay
    for, in SGLang's own count of bytes; `requests`: req_to_token and recurrent states."""

    charged: float
    kv: list[PoolBuffers]
    requests: PoolBuffers


@dataclass(frozen=True)
class TreePlan:
    """One tree's answer.

    `settings`: resolved arguments, by SGLang's names. `tokens`: KV tokens of one GPU, SGLang's
    `max_total_num_tokens`. `not_planned`: structures that a server has and that are not here.
    """

    release: str
    stop: Stop | None = None
    settings: dict[str, str | int | float | None] = field(default_factory=dict)
    geometry: Geometry | None = None
    row_use: RowUse | None = None
    tables: list[Table] = field(default_factory=list)
    tokens: int | None = None
    not_planned: list[str] = field(default_factory=list)
    capacity: Capacity | None = None
