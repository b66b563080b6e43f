"""Serves `import sglang` from its patched copy. kvgeom.pth runs this at every start of Python in
the environment, so it imports nothing and does its work when sglang is imported.

SGLang loads its plugins too late for this: a spawned scheduler has imported what the series edits
before it does.
"""

import os
import sys


class Finder:
    """Stands before Python's own finders; other packages are theirs."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "sglang":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.has_location:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """The package's own loader, pointed at the copy when the package is imported."""

    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        from kvgeom import plugin

        served = plugin.serve()
        spec.loader = self.inner
        if served is not None:
            spec.origin = self.inner.path = str(served / "__init__.py")
            spec.cached = None
            spec.submodule_search_locations[:] = [str(served)]
        return spec.loader.create_module(spec)

    def exec_module(self, module):  # only asked for: `create_module` has put `inner` in its place
        self.inner.exec_module(module)


# A checkout of kvgeom, installed in editable mode, is for work on the series: it serves nothing.
IS_WHEEL = os.path.isdir(os.path.join(os.path.dirname(__file__), "_series"))
if IS_WHEEL:
    sys.meta_path.insert(0, Finder)
