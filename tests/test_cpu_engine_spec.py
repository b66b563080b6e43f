"""Specs, gates and models: what can be checked without importing sglang."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from kvgeom.cpu_engine import EngineSetupError, EngineSpec, gates, models


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pair": "gqa"}, "pair 'gqa': choose one of mqa, mla"),
        ({"tp": 4, "dcp": 8}, "tp 4 must be a positive multiple of dcp 8"),
        ({"tp": 0}, "tp 0 must be"),
        (
            {"faults": ("none",)},
            "fault none: choose from draft-page, no-assertion, draft-host-pool",
        ),
        ({"algorithm": "EAGLE"}, "algorithm 'EAGLE': choose one of STANDALONE, DSPARK"),
        ({"algorithm": "DSPARK"}, "algorithm DSPARK drafts for pair mla, not mqa"),
    ],
)
def test_wrong_specs_say_what_is_wrong(wrong, message):
    with pytest.raises(ValueError, match=message):
        EngineSpec(**wrong)


def test_unknown_spec_fields_are_refused():
    with pytest.raises(ValueError, match="EngineSpec has no field dcp_size"):
        EngineSpec.from_json('{"dcp_size": 8}')


@pytest.mark.parametrize("pair", ["mqa", "mla"])
@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
def test_the_loc_space_is_the_same_at_every_dcp(pair, dcp):
    spec = EngineSpec(pair=pair, tp=8, dcp=dcp).resolved()
    assert spec.max_total_tokens * dcp == EngineSpec(pair=pair).resolved().max_total_tokens * 8
    assert spec.resolved() == spec
    assert EngineSpec.from_json(spec.to_json()) == spec


def module_of(**names) -> types.ModuleType:
    module = types.ModuleType("some.module")
    vars(module).update(names)
    return module


def gate_on(**expects) -> gates.Gate:
    return gates.Gate("g", "some.module", "why", expects, lambda module: None)


class Thing:
    def method(self, a, b=1):
        pass


def test_a_gate_that_fits_opens():
    module = module_of(Thing=Thing, flag=None, function=lambda *, x: x)
    expects = {"Thing.method": "self a b", "flag": None, "function": "x"}
    gate_on(**expects).check(module, "1.0")


@pytest.mark.parametrize(
    ("expects", "message"),
    [
        ({"gone": None}, r"gate 'g' does not fit SGLang 1\.0: some\.module\.gone does not exist"),
        ({"Thing.gone": "self"}, r"some\.module\.Thing\.gone does not exist"),
        ({"Thing.method": "self a"}, r"Thing\.method takes \(self a b\), not \(self a\)"),
    ],
)
def test_a_gate_that_does_not_fit_says_so(expects, message):
    with pytest.raises(EngineSetupError, match=message):
        gate_on(**expects).check(module_of(Thing=Thing), "1.0")


def test_a_flag_is_only_different_inside_the_function():
    module = module_of(flag=False)
    module.ask = lambda: module.flag
    module.fail = lambda: 1 / 0
    gates.answer_inside(module, "ask", module, flag=True)
    gates.answer_inside(module, "fail", module, flag=True)
    assert module.ask() is True
    with pytest.raises(ZeroDivisionError):
        module.fail()
    assert module.flag is False


def test_an_answer_is_only_different_for_the_function_named():
    module = module_of(question=lambda given: given)
    module.special = lambda: module.question(0)
    module.other = lambda: module.question(given=0)
    gates.answer_to(module, "question", ["special"], lambda own: not own)
    assert (module.special(), module.other(), module.question(0)) == (True, 0, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "kind", [("mqa", "STANDALONE"), ("mla", "STANDALONE"), ("mla", "DSPARK")], ids="-".join
)
def test_models_are_made_once_and_are_the_same_every_time(tmp_path, monkeypatch, kind, device):
    pair, algorithm = kind

    def make() -> tuple[Path, Path]:
        return models.target_and_draft(pair, device, algorithm)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = make()
    stamps = [(folder / "model.safetensors").stat().st_mtime_ns for folder in first]
    assert make() == first
    assert [(f / "model.safetensors").stat().st_mtime_ns for f in first] == stamps
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    for one, other in zip(first, make(), strict=True):
        assert one.name == other.name
        for name in ("config.json", "model.safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert sorted(p.name for p in first[0].parent.iterdir()) == sorted(f.name for f in first)
