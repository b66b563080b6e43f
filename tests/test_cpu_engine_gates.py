"""When gates are opened, on modules of our own."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvgeom.cpu_engine import EngineSetupError, gates


@pytest.fixture
def armed(monkeypatch):
    """armed(module): install one gate, which is of that imported module; the module."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def install(name: str, expects: str = "number") -> ModuleType:
        module = ModuleType(name)
        module.double = lambda number: 2 * number
        monkeypatch.setitem(sys.modules, name, module)

        def triple(module: ModuleType) -> None:
            module.double = lambda number: 3 * number

        one = gates.Gate("triple", name, "why", {"double": expects}, triple)
        monkeypatch.setattr(gates, "GATES", [one])
        gates.install("0.5.23")
        return module

    return install


def test_a_librarys_gate_is_opened_on_the_imported_module(armed):
    assert armed("little_library").double(2) == 6


def test_a_librarys_gate_that_does_not_fit_is_refused(armed):
    with pytest.raises(EngineSetupError, match=r"takes \(number\), not \(text\)"):
        armed("little_library", expects="text")


def test_sglang_is_not_to_be_imported_before(armed):
    with pytest.raises(EngineSetupError, match="before its gate was armed: sglang.little"):
        armed("sglang.little")
