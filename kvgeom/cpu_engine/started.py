"""An engine in a process of its own, started by `parent` where it cannot fork one (CUDA)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from kvgeom.cpu_engine.channel import Channel
from kvgeom.cpu_engine.engine import run_engine
from kvgeom.cpu_engine.spec import EngineSpec

if __name__ == "__main__":
    spec = EngineSpec.from_json(os.environ["KVGEOM_ENGINE_SPEC"])
    run_engine(spec, Channel(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2]))
