"""A real server that the plugin serves: SGLang's own command, its spawned processes, HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import REPOSITORY, linked_installation
from plugin_site import PluginSite, build_wheel

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site")
    made = PluginSite(root, build_wheel(root))
    linked_installation(made.packages)
    return made


GATES = """
from kvgeom.cpu_engine import gates, parent, stub
stub.install()
gates.install(parent.sglang_release())
"""


@pytest.fixture
def server(site, tmp_path):
    """server(**variables) -> (base address, log, pid) of a server by SGLang's own command.

    Its processes are spawned by SGLang. In each the kernels' stand-ins come with Python's start.
    """
    from kvgeom.cpu_engine import gates

    (site.packages / "cpu_gates.py").write_text(GATES)
    gate = site.packages / "zzz_gates.pth"
    gate.write_text(
        "import os; os.environ.get('SGLANG_USE_CPU_ENGINE') and __import__('cpu_gates')\n"
    )
    started = []

    def start(model: Path, **variables: str):
        log = tmp_path / "server.log"
        port = 31000 + os.getpid() % 1000
        words = (
            f"-m sglang.launch_server --model-path {model} --port {port} --device cpu "
            "--dtype float32 --tp-size 2 --dcp-size 2 --page-size 4 --max-total-tokens 64 "
            "--context-length 64 "
            "--max-running-requests 2 --attention-backend triton --sampling-backend pytorch "
            "--triton-attention-num-kv-splits 1 --skip-server-warmup --disable-cuda-graph"
        )
        with log.open("wb") as out:
            process = subprocess.Popen(
                [site.python, *words.split()],
                env=site.environment(**{**gates.ENVIRONMENT, **variables}),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        started.append(process)
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"{base}/v1/models", timeout=2):
                    return base, log, process.pid
            except OSError:
                time.sleep(0.5)
        raise AssertionError(log.read_text()[-4000:])

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    gate.unlink()


def with_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of a tiny model with a tokenizer of one token a word: w0 to w127."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return folder


def test_a_request_through_the_openai_api(site, server, tmp_path):
    from kvgeom.cpu_engine import models

    model = with_tokenizer(models.target_and_draft("mqa")[0], tmp_path / "model")
    base, log, pid = server(model, KVGEOM_PLUGIN="1")
    body = {"model": "x", "prompt": "w3 w4 w5", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{base}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        reply = json.load(answer)
    assert reply["usage"]["completion_tokens"] == 4
    assert len(reply["choices"][0]["text"].split()) == 4
    text = log.read_text()
    lines = [line for line in text.splitlines() if "kvgeom: series" in line]
    assert len(lines) == 2, text[-4000:]
    assert f"on SGLang 0.5.23, from {site.cache}" in lines[0]
    # 2 x 64 tokens in pages of 2 x 4, one of them never handed out.
    assert "target pool 68 rows, allocator page 8, reach 136" in lines[1]
    for words in (["--pid", str(pid)], ["--log", str(log)]):
        command = [sys.executable, "-m", "kvgeom.cli", "doctor", *words]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("not affected: "), done.stderr
        assert "dcp 2, page 4, no speculation, context 64" in done.stdout
    assert "kvgeom's plugin served" in done.stdout
