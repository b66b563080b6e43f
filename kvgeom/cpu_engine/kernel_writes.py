"""Bounds mode for Triton kernels: every store of the interpreter lies in a buffer of its launch.

On a GPU, and in the interpreter as it is, a store past the end of an index buffer changes whatever
lies behind it. Here it is reported, with the kernel's name and the argument it ran out of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

# Called with (kernel, argument, element past its end, its elements); raises.
OnOverrun = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class _Buffer:
    name: str
    start: int  # addresses of the storage, in bytes
    end: int
    tensor: torch.Tensor


def watch(on_overrun: OnOverrun) -> None:
    """Check every store of every kernel that this process launches from now on."""
    from triton.runtime import interpreter

    launch, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder
    store = builder.create_masked_store
    launches: list[tuple[str, list[_Buffer]]] = []

    def watched_launch(self, *args, **kwargs):
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        launches.append((self.fn.__name__, _buffers(given)))
        try:
            return launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            raise error.__cause__ or error from None
        finally:
            launches.pop()

    def watched_store(ptrs, value, mask, *rest):
        kernel, buffers = launches[-1]
        outside = _outside(ptrs.data[mask.data.astype(bool)], buffers)
        if outside is not None:
            on_overrun(kernel, *_past(outside, buffers))
        return store(ptrs, value, mask, *rest)

    interpreter.GridExecutor.__call__ = watched_launch
    builder.create_masked_store = watched_store


def _buffers(given: dict) -> list[_Buffer]:
    """The memory that a launch was given, one entry an argument."""
    found = []
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            found.append(_Buffer(name, start, start + storage.nbytes(), tensor))
    return found


def _outside(addresses: np.ndarray, buffers: list[_Buffer]) -> int | None:
    """The first address in none of the buffers."""
    if addresses.size == 0:
        return None
    low, high = int(addresses.min()), int(addresses.max())
    if any(b.start <= low and high < b.end for b in buffers):
        return None
    inside = np.zeros(addresses.shape, dtype=bool)
    for b in buffers:
        inside |= (addresses >= b.start) & (addresses < b.end)
    return None if inside.all() else int(addresses[~inside].reshape(-1)[0])


def _past(address: int, buffers: list[_Buffer]) -> tuple[str, int, int]:
    """The argument that ends nearest before the address, the element there, and its elements."""
    nearest = min(buffers, key=lambda b: (address < b.end, abs(address - b.end)))
    element = (address - nearest.tensor.data_ptr()) // nearest.tensor.element_size()
    return nearest.name, element, nearest.tensor.numel()
