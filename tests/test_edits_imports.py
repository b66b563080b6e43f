"""The import op: an isort-clean file stays clean, and nothing is imported twice."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import applied, run_edits

from kvgeom.source import Problem

HEAD = '''\
# licence
"""Doc."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers import norm
from sglang.srt.mem_cache.rows import Rows
from sglang.srt.utils import (
    ceil_div,
    is_cuda,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache import page_geometry

logger = logging.getLogger(__name__)
'''

CODES = [
    "from sglang.srt.mem_cache import page_geometry",
    "from sglang.srt.mem_cache.rows import Headroom",
    "from sglang.srt.mem_cache.rows import a_name, ZONE, Zone",
    "from sglang.srt.layers import linear",
    "from sglang.srt.utils import cpu_count",
    "from sglang.srt.utils import zzz",
    "from sglang.srt.a import b",
    "from sglang.zrt import b",
    "import sglang.srt.model",
    "import math",
    "import zlib",
    "from math import ceil",
    "from typing import Any",
    "import msgspec",
    "import zmq",
    "from numpy import array",
    "from __future__ import division",
    "from sglang.srt.mem_cache.rows import Rows as R",
    "import sglang.srt.mem_cache.page2 as p\nfrom sglang.srt.mem_cache.page10 import q",
]


def isort_clean(source: str, tmp_path) -> str:
    """What isort's rules (ruff's I, profile black) find wrong; "" is clean."""
    (tmp_path / "x.py").write_text(source)
    command = [
        sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I", "--line-length", "88",
        "--config", "lint.isort.known-first-party=['sglang']", "--no-cache", "--output-format",
        "concise", "x.py",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


@pytest.mark.parametrize("code", CODES)
def test_a_clean_file_stays_clean(code, tmp_path):
    assert isort_clean(HEAD, tmp_path) == ""
    out = applied(HEAD, op="import", code=code)
    assert isort_clean(out, tmp_path) == "", out
    kept = [line for line in HEAD.split("\n") if line not in out.split("\n")]
    assert len(kept) <= 1  # only a line that was extended


def test_all_of_them_together(tmp_path):
    tables = [{"op": "import", "code": c} for c in CODES]
    states, raw = run_edits(HEAD, *tables)
    assert isort_clean(raw.decode(), tmp_path) == "", raw.decode()
    assert run_edits(raw, *tables) == (["applied"] * len(CODES), raw)


def test_an_import_for_type_checkers_does_not_count():
    out = applied(HEAD, op="import", code="from sglang.srt.mem_cache import page_geometry")
    assert out.count("import page_geometry") == 2


def test_a_long_line_is_wrapped(tmp_path):
    head = "from sglang.srt.mem_cache.rows import a_name_that_is_long, another_name_that_is_long\n"
    code = "from sglang.srt.mem_cache.rows import and_one_more"
    out = applied(head + "\nx = 1\n", op="import", code=code)
    assert out.startswith("from sglang.srt.mem_cache.rows import (\n    a_name_that_is_long,\n")
    assert isort_clean(out, tmp_path) == ""


def test_a_line_a_name_stays_so():
    code = "from sglang.srt.mem_cache.rows import (\n    a,\n    b,\n)\n"
    assert applied("import os\n\nx = 1\n", op="import", code=code).count(code) == 1


@pytest.mark.parametrize(
    "source",
    ["x = 1\n", '"""Doc."""\n\nx = 1\n', '"""Doc."""\nx = 1\n', "# c\n\nx = 1\n", "import os\n"],
)
def test_the_first_import_of_its_kind(source, tmp_path):
    out = applied(source, op="import", code="from sglang.a import b")
    assert isort_clean(out, tmp_path) == "", out


def test_crlf_stays():
    out = applied(
        HEAD.replace("\n", "\r\n").encode(), op="import", code="from sglang.srt.utils import zzz"
    )
    assert "    is_cuda,\r\n    zzz,\r\n)" in out and "\n" not in out.replace("\r\n", "")


def test_an_empty_file_is_a_problem():
    with pytest.raises(Problem, match="no statement"):
        run_edits("# nothing\n", {"op": "import", "code": "import os"})
