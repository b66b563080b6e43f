"""Messages from the engine and its ranks to the supervisor, over one SEQPACKET socket.

A message is one JSON object in one packet, so it is whole or not there, whoever writes it.
"""

from __future__ import annotations

import json
import socket
import traceback

PACKET = 1 << 16  # bytes, more than any message


class Channel:
    """The sending end; every process forked after it was made shares it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock

    def send(self, kind: str, **fields) -> None:
        """Send one message; blocks while the supervisor is behind."""
        self.sock.send(json.dumps({"kind": kind, **fields}).encode())

    def error(self, stage: str, error: BaseException, rank: int | None) -> None:
        """Report an exception with the end of its traceback."""
        self.send(
            "error",
            stage=stage,
            type=type(error).__name__,
            message=str(error)[:4000],
            rank=rank,
            traceback="".join(traceback.format_exception(error))[-2000:],
        )
