"""Triton's interpreter with its per-launch housekeeping done once. The kernels run as written."""

from __future__ import annotations

import dataclasses
import importlib
from contextlib import suppress
from types import ModuleType

from kvgeom.cpu_engine.gates import GATES, gate
from kvgeom.cpu_engine.spec import EngineSetupError


def quicken(release: str) -> None:
    """Open these gates alone; one that does not fit another Triton stays shut."""
    for item in (g for g in GATES if g.module.startswith("triton.")):
        module = importlib.import_module(item.module)
        with suppress(EngineSetupError):
            item.check(module, release)
            item.open(module)


def rewrite_kernels(module: ModuleType) -> None:
    """What the interpreter does at a kernel's first launch, for the kernels of a module."""
    from triton.runtime.interpreter import InterpretedFunction

    for kernel in [*vars(module).values()]:  # rewriting adds to them
        if isinstance(kernel, InterpretedFunction):
            kernel.rewrite()


@gate(
    "triton.runtime.interpreter",
    why="redirects the language to its interpreter at every launch; once a module is enough",
    expects={"_patch_lang": "fn", "_LangPatchScope": "", "InterpretedFunction": "fn kwargs"},
)
def patch_language_once(module: ModuleType) -> None:
    patch, nothing_to_restore = module._patch_lang, module._LangPatchScope()
    patched: set[int] = set()

    def _patch_lang(fn):
        names = id(fn.__globals__)
        if names not in patched:
            patched.add(names)
            patch(fn)
        return nothing_to_restore

    module._patch_lang = _patch_lang


@gate(
    "triton.runtime.interpreter",
    why="builds a table of every dtype at every look-up",
    expects={"_get_np_dtype": "tt_dtype"},
)
def remember_dtypes(module: ModuleType) -> None:
    look_up, known = module._get_np_dtype, {}

    def _get_np_dtype(tt_dtype):
        scalar = tt_dtype.scalar
        key = "pointer" if scalar.is_ptr() else scalar.name
        if key not in known:
            known[key] = look_up(tt_dtype)
        return known[key]

    module._get_np_dtype = _get_np_dtype


@gate(
    "triton.runtime.interpreter",
    why="widens every sum and product to look for overflow, for an assertion that debug mode reads",
    expects={"interpreter_builder.options.sanitize_overflow": None},
)
def leave_out_overflow_checks(module: ModuleType) -> None:
    builder = module.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@gate(
    "triton.language.core",
    why="checks a block's shape and spells its name at every intermediate result",
    expects={"block_type.__init__": "self element_ty shape"},
)
def remember_block_types(module: ModuleType) -> None:
    build, known = module.block_type.__init__, {}

    def __init__(self, element_ty, shape):
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in known:
            build(self, element_ty, shape)
            known[key] = vars(self)
        vars(self).update(known[key])

    module.block_type.__init__ = __init__


@gate(
    "triton.language.core",
    why="makes a constant of every size of every intermediate result",
    expects={"tensor.__init__": "self handle type"},
)
def remember_tensor_shapes(module: ModuleType) -> None:
    build, known = module.tensor.__init__, {}

    def __init__(self, handle, type):
        key = (*type.shape.values,) if type.is_block() else ()
        if key not in known:
            build(self, handle, type)
            known[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(known[key], handle=handle, type=type, dtype=type.scalar)

    module.tensor.__init__ = __init__
