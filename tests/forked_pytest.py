"""pytest in a process forked from one that has imported what every SGLang imports.

Those imports are most of a short run's time. No SGLang is among them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

IMPORTS = (
    "pytest", "torch", "torchvision", "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo", "triton_kernels.tensor", "cutlass", "flashinfer.comm",
    "openai", "fastapi", "scipy.stats", "datasets", "aiohttp.web", "gguf", "IPython",
)  # fmt: skip
# Older releases bring their own: the server that has these is not for them.
WITH_TRANSFORMERS = (
    *IMPORTS, "transformers", "transformers.configuration_utils",
    "transformers.models.llama.modeling_llama", "compressed_tensors", "xgrammar",
)  # fmt: skip
# Read when they are imported. Threads that spin would take the other core.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
_SERVERS = {imports: forkserver.ForkServer() for imports in (IMPORTS, WITH_TRANSFORMERS)}


def run(arguments: list[str], *, cwd: Path, path: Sequence[Path], log: Path) -> None:
    """`python -m pytest` in `cwd`, with the folders `path` first on sys.path; output to `log`."""
    imports = WITH_TRANSFORMERS if len(path) == 1 else IMPORTS
    server = _SERVERS[imports]
    server.set_forkserver_preload([*imports])
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(arguments, str(cwd), [*map(str, path)], str(log)))
    with (
        patch.dict(os.environ, ENVIRONMENT),
        patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        process.start()
    process.join()


def _run(arguments: list[str], cwd: str, path: list[str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [n for n in os.environ if n.startswith("PYTEST_")]:  # the caller's, not these
        del os.environ[name]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path[:] = [*path, *(p for p in sys.path if p != str(Path(__file__).parent))]
    os.chdir(cwd)
    gc.freeze()  # a collection must not look at what was imported
    import pytest

    from kvgeom.cpu_engine import interpreter

    interpreter.quicken("of these tests")
    sys.exit(pytest.main(arguments))
