"""What `kvgeom boot --json` writes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from kvgeom import __version__, boot_checks
from kvgeom.boot_checks import Claim
from kvgeom.cpu_engine import EngineReport
from kvgeom.deployment import published
from kvgeom.errors import KvgeomError
from kvgeom.series import Series
from kvgeom.tree import Tree


def as_json(
    stack: Series,
    found: Tree,
    reports: dict[str, EngineReport],
    answers: published.Answers | None,
    result: list[Claim],
    seconds: float,
) -> str:
    """Everything that was run and what it came to."""
    green, control = reports.get("patched"), reports.get("control")
    out = {
        "ok": all(c.ok for c in result),
        "claims": [asdict(c) for c in result],
        "kvgeom": __version__,
        "sglang": str(found.release),
        "series": {"id": stack.id, "prs": [pr.id for pr in stack.prs]},
        "tree": str(found.package),
        "seconds": round(seconds, 1),
        "peak_rss_mb": max((r.peak_rss_mb for r in reports.values()), default=0),
        "table": [],
        "rank_differences": [],
        "comparison": None,
        "runs": {name: asdict(report) for name, report in reports.items()},
        "deployments": published.deployments(*answers) if answers else [],
    }
    if green and green.geometry:
        rows = boot_checks.table(green.geometry[0], green.max_req_to_token_end)
        out["table"] = [asdict(row) for row in rows]
        out["rank_differences"] = boot_checks.rank_differences(green.geometry)
    if green and control:
        out["comparison"] = asdict(boot_checks.compare(green, control))
    return json.dumps(out, indent=2)


def check_target(file: str | None, option: str = "--json") -> Path | None:
    """Where an option's file goes, None for standard output; KvgeomError (2) before any work."""
    if file in (None, "-"):
        return None
    path = Path(file).expanduser().resolve()
    if path.exists() and not path.is_file():
        why = "is not an ordinary file"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = f"{path.parent} cannot be written"
    else:
        return path
    raise KvgeomError(
        f"{option} {file}: {why}", "name a file in a folder that can be written, or -", 2
    )


def write(path: Path, text: str) -> None:
    """Replace `path` by one rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise KvgeomError(f"{path}: {error.strerror}; it was not written") from None
    finally:
        temporary.unlink(missing_ok=True)
