"""Run one engine by hand: python -m kvgeom.cpu_engine SPEC.json [--tree DIR] [--out REPORT.json]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvgeom.cpu_engine import EngineSetupError, EngineSpec, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvgeom.cpu_engine", description=__doc__)
    parser.add_argument("spec", type=Path, help="an EngineSpec as JSON; {} takes every default")
    parser.add_argument("--tree", type=Path, help="folder that holds the sglang package")
    parser.add_argument("--out", type=Path, help="where the report goes; standard output if unset")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds")
    args = parser.parse_args()
    try:
        spec = EngineSpec.from_json(args.spec.read_text())
        report = run(spec, tree=args.tree, on_event=_show, timeout=args.timeout)
    except KeyboardInterrupt:
        print("interrupted; the engine has been ended", file=sys.stderr)
        return 130
    except (EngineSetupError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.out:
        args.out.write_text(report.to_json())
    else:
        print(report.to_json())
    return 0 if report.ok else 1


def _show(stage: str, detail: str) -> None:
    print(f"{stage}: {detail}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
