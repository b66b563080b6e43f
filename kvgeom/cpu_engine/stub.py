"""The `sgl_kernel` that the engine imports: the real one needs libcuda, which is not there."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from kvgeom.cpu_engine import kernels, tree_kernels

NAME = "sgl_kernel"
# Plain Python in the wheel, so the wheel's own file is loaded.
PLAIN_PYTHON = "scalar_type"


def _missing(name: str):
    def call(*args, **kwargs):
        raise NotImplementedError(f"{name} has no stand-in on the CPU engine")

    call.__name__ = name.rpartition(".")[2]
    return call


class _StubModule(ModuleType):
    """Our ops by name; any other name is a function that raises when it is called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        for module in (kernels, tree_kernels):
            if hasattr(module, name):
                return getattr(module, name)
        return _missing(f"{self.__name__}.{name}")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for sgl_kernel and everything below it."""

    def __init__(self, wheel: Path | None):
        self.wheel = wheel

    def find_spec(self, name, path=None, target=None):
        if name == f"{NAME}.{PLAIN_PYTHON}" and self.wheel is not None:
            return importlib.util.spec_from_file_location(name, self.wheel / f"{PLAIN_PYTHON}.py")
        if name == NAME or name.startswith(f"{NAME}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def install() -> None:
    """Put the stand-in in front of the installed sgl_kernel, which is not imported."""
    wheel = importlib.machinery.PathFinder.find_spec(NAME)
    folder = Path(wheel.origin).parent if wheel and wheel.origin else None
    sys.meta_path.insert(0, _StubFinder(folder))
