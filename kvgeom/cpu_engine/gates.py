"""The places where SGLang refuses a CPU, each opened by name with one line of why.

A gate is opened when its module has been imported, before any other module copies a name from it.
It first checks that what it changes exists with the parameters it knows; if not, the import fails
with the gate's name and the release. A gate of a library changes nothing that is copied, and may be
opened later.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from kvgeom.cpu_engine.spec import EngineSetupError

KNOWN_RELEASES = ("0.5.23",)

# Settings that open a gate by themselves; set before sglang is imported.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # is_cpu() answers True
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # the stand-in has no version
    "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",  # an installed NCCL would look for a GPU
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",  # no /dev/shm segments to leave behind
    "TORCHDYNAMO_DISABLE": "1",  # every rank would compile the same small functions
    "TRITON_INTERPRET": "1",  # Triton kernels run on CPU tensors
    "CUDA_VISIBLE_DEVICES": "",  # the same run on a machine that has GPUs
    "OMP_NUM_THREADS": "1",  # many ranks on few cores
    "GLOO_SOCKET_IFNAME": "lo",  # collectives over loopback
    "HF_HUB_OFFLINE": "1",  # the models are local
    "KVGEOM_PLUGIN": "0",  # the tree is run as it is
}

# On CUDA no gate is opened.
CUDA_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the models are local
    "KVGEOM_PLUGIN": "0",  # the tree is run as it is
    "TRITON_F32_DEFAULT": "ieee",  # float32 products, to compare logprobs with
}


@dataclass(frozen=True)
class Gate:
    """`expects` maps a dotted name in `module` to its parameter names; None: it has to exist."""

    name: str
    module: str
    why: str
    expects: dict[str, str | None]
    open: Callable[[ModuleType], None]

    def check(self, module: ModuleType, release: str) -> None:
        """Raise EngineSetupError unless every expected name is there with its parameters."""
        for path, parameters in self.expects.items():
            try:
                found = functools.reduce(getattr, path.split("."), module)
            except AttributeError:
                problem = "does not exist"
            else:
                got = parameters and " ".join(inspect.signature(found).parameters)
                problem = got != parameters and f"takes ({got}), not ({parameters})"
            if problem:
                raise EngineSetupError(
                    f"gate {self.name!r} does not fit SGLang {release}: "
                    f"{self.module}.{path} {problem}"
                )


GATES: list[Gate] = []


def gate(module: str, *, why: str, expects: dict[str, str | None]):
    """Register the function below as a gate of `module`."""

    def register(function: Callable[[ModuleType], None]):
        GATES.append(Gate(function.__name__, module, why, expects, function))
        return function

    return register


def answer_inside(owner, function: str, module: ModuleType, **flags) -> None:
    """While `owner.function` runs, the module's global flags have the given values."""
    inner = getattr(owner, function)

    @functools.wraps(inner)
    def call(*args, **kwargs):
        before = {name: getattr(module, name) for name in flags}
        vars(module).update(flags)
        try:
            return inner(*args, **kwargs)
        finally:
            vars(module).update(before)

    setattr(owner, function, call)


def answer_to(module: ModuleType, question: str, asked_by: list[str], answer) -> None:
    """`module.question(...)` gives answer(its own answer) to the functions named in asked_by."""
    ask = getattr(module, question)
    askers = {getattr(module, name).__code__ for name in asked_by}

    def asked(*args, **kwargs):
        own = ask(*args, **kwargs)
        return answer(own) if sys._getframe(1).f_code in askers else own

    setattr(module, question, asked)


class View:
    """`inner` with some attributes answered differently."""

    def __init__(self, inner, **answers):
        self._inner = inner
        self.__dict__.update(answers)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def check_release(release: str) -> None:
    """Raise EngineSetupError unless the gates were written for this release."""
    if release not in KNOWN_RELEASES:
        raise EngineSetupError(
            f"the CPU engine knows SGLang {', '.join(KNOWN_RELEASES)}, this tree is {release}: "
            "install a known release or point --tree at one"
        )


class _GateFinder(importlib.abc.MetaPathFinder):
    """Finds gated modules as the others would, and opens the gate after the module has run."""

    def __init__(self, release: str):
        self.release = release
        self.gates: dict[str, list[Gate]] = {}
        for item in GATES:
            self.gates.setdefault(item.module, []).append(item)

    def find_spec(self, name, path=None, target=None):
        if name not in self.gates:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._open_after(spec.loader, self.gates[name])
                return spec
        return None

    def _open_after(self, loader, gates: list[Gate]) -> None:
        run = loader.exec_module

        def exec_module(module):
            run(module)
            for item in gates:
                item.check(module, self.release)
                item.open(module)

        loader.exec_module = exec_module


def install(release: str) -> None:
    """Arm every gate, and open those of libraries that are imported already.

    Raises EngineSetupError where a gated module of SGLang was imported before.
    """
    from kvgeom.cpu_engine import (  # noqa: F401  register gates
        dspark_gates,
        hicache_gates,
        interpreter,
        mla_gates,
        sglang_gates,
    )

    here = [item for item in GATES if item.module in sys.modules]
    early = sorted({item.module for item in here if item.module.startswith("sglang.")})
    if early:
        raise EngineSetupError(f"imported before its gate was armed: {', '.join(early)}")
    sys.meta_path.insert(0, _GateFinder(release))
    for item in here:
        item.check(sys.modules[item.module], release)
        item.open(sys.modules[item.module])


def import_all() -> None:
    """Import every gated module, so that a gate that does not fit is found before any boot."""
    for item in GATES:
        try:
            importlib.import_module(item.module)
        except ModuleNotFoundError as error:
            raise EngineSetupError(f"gate {item.name!r}: no module {item.module}") from error
