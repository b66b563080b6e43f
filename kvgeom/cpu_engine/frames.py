"""Room for the frames of deep calls, in Python's own bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ROOM = 512 << 10  # bytes; SGLang's deepest calls need about a tenth


def with_room(function: Callable[[], T]) -> T:
    """`function()`, where the frames of all that it calls lie in one chunk of memory.

    CPython takes frames from chunks of 16 KiB: a call that does not fit maps the next one and its
    return unmaps it. A loop at such an edge, as Triton's interpreter has, does so at every turn. A
    frame larger than a chunk gets one that is the next power of two, and calls below use the rest.
    """

    def call() -> T:
        return function()

    call.__code__ = call.__code__.replace(co_stacksize=_ROOM // 8)
    return call()
