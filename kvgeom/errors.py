"""What kvgeom tells a user instead of a traceback."""

from __future__ import annotations


class KvgeomError(Exception):
    """A refusal: one sentence that names the thing, the way out, and the exit code.

    Exit code 1: the tree or the series does not allow it. 2: the arguments are wrong.
    """

    def __init__(self, message: str, way_out: str = "", exit_code: int = 1):
        super().__init__(message)
        self.message = message
        self.way_out = way_out
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\n{self.way_out}" if self.way_out else self.message
