"""The caller's side: one child on a tree."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvgeom.cpu_engine.gates import ENVIRONMENT
from kvgeom.cpu_engine.spec import decode
from kvgeom.deployment.spec import Request, TreePlan
from kvgeom.errors import KvgeomError

_TIMEOUT_S = 300.0
# The CPU engine's own settings, but that SGLang is not told to serve on a CPU.
_SETTINGS = {k: v for k, v in ENVIRONMENT.items() if k != "SGLANG_USE_CPU_ENGINE"}


def ask(package: Path, *requests: Request) -> list[TreePlan]:
    """What the SGLang in `package` makes of each; it is only read.

    KvgeomError where it gives no answer.
    """
    ours = Path(__file__).resolve().parents[2]
    path = [str(package.parent), str(ours), *filter(None, [os.environ.get("PYTHONPATH")])]
    asked = "".join(json.dumps(dataclasses.asdict(request)) + "\n" for request in requests)
    with tempfile.TemporaryDirectory(prefix="kvgeom-") as scratch:
        settings = {
            "TMPDIR": scratch,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(path),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "kvgeom.deployment.child"],
                input=asked,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env={**os.environ, **_SETTINGS, **settings},
            )
        except subprocess.TimeoutExpired:
            raise KvgeomError(
                f"no plan from {package} after {_TIMEOUT_S:g} s", "run the command again"
            ) from None
    answers = done.stdout.splitlines()
    if len(answers) != len(requests):
        lines = done.stderr.strip().splitlines()
        raise KvgeomError(
            f"SGLang in {package} gave no plan; its last line: {lines[-1] if lines else 'none'}",
            "`kvgeom status` tells whether that SGLang is as released",
        )
    return [decode(TreePlan, json.loads(answer)) for answer in answers]
