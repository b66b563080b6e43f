"""Page geometry: the locs an allocator hands out, read from the allocator.

    loc   0 ............ first | first ......... reach |
          reserved (padding)   | allocatable           | never handed out
                               |<- num_pages pages ->  |

A pool that an allocator indexes raw needs a row for every loc in [0, reach).
"""

from __future__ import annotations

import msgspec


class PageGeometryError(AssertionError):
    """A structure does not cover the locs or positions that index it."""


class LocSpace(msgspec.Struct, frozen=True, kw_only=True):
    """Every loc one allocator can hand out. Counts are tokens unless said.

    ValueError on a page size below 1 or a negative page count.
    """

    page_size: int
    # Allocatable pages; `reserved_pages` padding pages lie below them.
    num_pages: int
    reserved_pages: int = 1

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 0 or self.reserved_pages < 0:
            raise ValueError(
                "loc space needs page_size >= 1 and page counts >= 0, got "
                f"page_size={self.page_size} num_pages={self.num_pages} "
                f"reserved_pages={self.reserved_pages}"
            )

    @property
    def size(self) -> int:
        """Tokens that can be allocated at once."""
        return self.num_pages * self.page_size

    @property
    def first(self) -> int:
        """The lowest loc handed out."""
        return self.reserved_pages * self.page_size

    @property
    def reach(self) -> int:
        """The first loc never handed out."""
        return self.first + self.size

    @property
    def pool_size(self) -> int:
        """The `size` of a pool with `reach` rows: a pool adds one page to it."""
        return self.reach - self.page_size

    def scale(self, *, page_size: int) -> int:
        """How many pages of `page_size` one page of this space spans.

        ValueError when they do not divide.
        """
        if self.page_size % page_size:
            raise ValueError(
                f"allocator page {self.page_size} is no multiple of page {page_size}"
            )
        return self.page_size // page_size
