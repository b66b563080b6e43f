"""How `kvgeom plan` reads its command line, and where it finds a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvgeom import plan_cli
from kvgeom.cli import app
from kvgeom.deployment import named_models


def kvgeom(*args: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "kvgeom.cli", "plan", *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize(
    "args, sentence",
    [
        (["--svg", "/nowhere/x.svg", "--", "x"], "--svg /nowhere/x.svg: there is no folder"),
        (["--tree", "/nowhere", "--", "x"], "--tree /nowhere: there is no such folder"),
        ([], "Missing argument"),
        (["--gpu-memory", "0", "--", "x"], "--gpu-memory"),
    ],
)
def test_wrong_options(args, sentence):
    done = kvgeom(*args)
    assert done.returncode == 2 and done.stdout == "" and sentence in done.stderr


class Asked(Exception):
    """What would have been planned."""


@pytest.mark.parametrize(
    "words",
    [
        ["--", "--model-path", "m", "--tp-size", "8"],
        ["--model-path", "m", "--tp-size", "8"],
        ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--tp-size", "8"],
        ["--", "sglang", "serve", "--model-path", "m", "--tp-size", "8"],
        ["SGLANG_X=1 python3 -m sglang.launch_server --model-path m --tp-size 8"],
    ],
)
def test_every_way_to_paste_a_command(words, monkeypatch):
    def plans(request, stack, found, console):
        raise Asked(request)

    monkeypatch.setattr(plan_cli, "_plans", plans)
    done = CliRunner().invoke(app, ["plan", "--weights", "20", *words])
    assert isinstance(done.exception, Asked), (done.exception, done.output)
    (request,) = done.exception.args
    assert request.arguments == ["--model-path", "m", "--tp-size", "8"] and request.weights == 20


def test_a_repository_in_the_cache_of_hugging_face(tmp_path, monkeypatch):
    repository = tmp_path / "models--an--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert named_models.folder("an/model", "--model-path") == snapshot
    with pytest.raises(ValueError) as raised:
        named_models.folder("an/other", "--model-path")
    assert "a repository after `hf download REPOSITORY config.json`" in str(raised.value)


def test_help_names_the_configurations():
    told = plan_cli.plan.__doc__
    assert [name for name in named_models.names() if name not in told] == []
    for name in named_models.names():
        assert json.loads(Path(named_models.folder(name, ""), "config.json").read_text())


def test_a_release_that_plan_does_not_know(tmp_path):
    from conftest import make_tree

    make_tree(tmp_path / "site", release="0.5.99")
    done = kvgeom("--tree", str(tmp_path / "site"), "--", "x")
    assert done.returncode == 2
    assert (
        f"kvgeom plan knows SGLang {', '.join(plan_cli.RELEASES)}, this tree is 0.5.99"
        in done.stderr
    )
