"""The process that runs SGLang's code for plans: python -m kvgeom.deployment.child

Reads one Request (JSON) a line from standard input and writes one TreePlan (JSON) a line; SGLang's
own words go to standard error. Each is made in a fork of its own, as SGLang's configuration belongs
to a process; what all of them import is imported once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SGLang prints must not get between
    from kvgeom.deployment import build
    from kvgeom.deployment.spec import Request

    requests = [Request(**json.loads(line)) for line in sys.stdin]
    build.preload(requests)
    for request in requests:
        pid = os.fork()
        if pid == 0:
            try:
                out.write(json.dumps(dataclasses.asdict(build.plan(request))) + "\n")
                out.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
