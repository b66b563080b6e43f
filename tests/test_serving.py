"""Real servers with the series, by the plugin and in place: SGLang's own command, its spawned
processes, a speculative draft under DCP, the OpenAI-compatible API over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY, linked_installation
from plugin_site import PluginSite, build_wheel

from kvgeom import series

pytestmark = pytest.mark.engine

SERIES = f"series {series.load().id} on SGLang 0.5.23"
# 2 x 64 tokens in pages of 2 x 4, one of them never handed out.
POOLS = [
    f"kvgeom: {SERIES}: target pool 68 rows, allocator page 8, reach 136",
    f"kvgeom: {SERIES}: draft pool 136 rows, allocator page 8, reach 136",
]
PROMPT = " ".join(f"w{i}" for i in range(3, 40))
GATES = """
import gc
gc.set_threshold(100_000)  # what an import makes stays
from kvgeom.cpu_engine import gates, parent, stub
stub.install()
gates.install(parent.sglang_release())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> PluginSite:
    """kvgeom's wheel beside SGLang. In each process of a server the kernels' stand-ins come with
    Python's start."""
    root = tmp_path_factory.mktemp("site")
    made = PluginSite(root, build_wheel())
    linked_installation(made.packages)
    (made.packages / "cpu_gates.py").write_text(GATES)
    (made.packages / "zzz_gates.pth").write_text(
        "import os; os.environ.get('SGLANG_USE_CPU_ENGINE') and __import__('cpu_gates')\n"
    )
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """Target and draft."""
    from kvgeom.cpu_engine import models

    target, draft = models.target_and_draft("mqa")
    return with_tokenizer(target, tmp_path_factory.mktemp("model")), draft


def with_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a tiny model with a tokenizer of one token a word: w0 to w127."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return folder


@dataclass(frozen=True)
class Server:
    base: str
    log: Path
    pid: int

    def get(self, path: str, body: dict | None = None, timeout: float = 120) -> dict:
        """The JSON at `path`; of a POST where there is a body."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"{self.base}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def said(self) -> list[str]:
        """What kvgeom wrote into its log."""
        lines = self.log.read_text().splitlines()
        return [line[line.index("kvgeom: ") :] for line in lines if "kvgeom: series" in line]


@pytest.fixture
def server(site, models, tmp_path):
    """A server by SGLang's own command, up."""
    from kvgeom.cpu_engine import gates

    log, port = tmp_path / "server.log", 31000 + os.getpid() % 1000
    target, draft = models
    words = (
        f"-m sglang.launch_server --model-path {target} --port {port} --device cpu "
        "--dtype float32 --tp-size 2 --dcp-size 2 --page-size 4 --max-total-tokens 64 "
        "--context-length 64 --max-running-requests 2 --attention-backend triton "
        f"--speculative-algorithm STANDALONE --speculative-draft-model-path {draft} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
        "--speculative-draft-attention-backend triton --sampling-backend pytorch "
        "--triton-attention-num-kv-splits 1 --skip-server-warmup --disable-cuda-graph"
    )
    with log.open("wb") as out:
        process = subprocess.Popen(
            [site.python, *words.split()],
            env=site.environment(**{**gates.ENVIRONMENT, "KVGEOM_PLUGIN": "1"}),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield _up(Server(f"http://127.0.0.1:{port}", log, process.pid), process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _up(server: Server, process: subprocess.Popen) -> Server:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.get("/v1/models", timeout=2)
            return server
        except OSError:
            time.sleep(0.5)
    raise AssertionError(server.log.read_text()[-4000:])


@pytest.fixture
def applied(site):
    """The series applied to the site's SGLang by the command of its wheel."""
    with_command(site, "apply")
    yield
    with_command(site, "revert")


def with_command(site, word: str) -> None:
    run = f"import sys; from kvgeom.cli import main; sys.argv[1:] = [{word!r}]; main()"
    done = site.run(run)
    assert done.returncode == 0, done.stderr


def check_requests(server: Server) -> None:
    """Two completions, one of them with a cached prompt; greedy, so their texts are one."""
    body = {"model": "x", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    body |= {"ignore_eos": True, "return_spec_tokens_details": True}
    first, again = (server.get("/v1/completions", body) for _ in range(2))
    assert len(first["choices"][0]["text"].split()) == 16
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    for reply in (first, again):
        assert reply["usage"]["completion_tokens"] == 16
        assert reply["sglext"]["spec_tokens_details"]["spec_accept_length"] > 1


def doctor(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvgeom.cli", "doctor", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_plugin_serves(site, server):
    check_requests(server)
    said = server.said()
    assert said[0].startswith(f"kvgeom: {SERIES}, from {site.cache}")
    assert said[1:] == POOLS, server.log.read_text()[-4000:]
    for words in (["--pid", str(server.pid)], ["--log", str(server.log)]):
        done = doctor(*words)
        assert done.returncode == 0 and done.stdout.startswith("not affected: "), done.stderr
        assert "dcp 2, page 4, STANDALONE 3/1/4, context 64" in done.stdout
    assert "its log says that it started with the series" in done.stdout
    assert not (site.packages / "sglang/srt/mem_cache/page_geometry.py").exists()


def test_a_patched_tree_serves(site, applied, server):
    check_requests(server)
    said = server.said()
    assert said[0] == f"kvgeom: {SERIES}, applied in place, the plugin does nothing"
    assert said[1:] == POOLS, server.log.read_text()[-4000:]
    done = doctor("--pid", str(server.pid))
    assert done.returncode == 0, done.stderr
    assert "not affected: on SGLang 0.5.23, the series is applied" in done.stdout
    done = doctor("--log", str(server.log))
    assert done.returncode == 0, done.stderr
    assert "its log says that it started with the series" in done.stdout
