"""Whether a name that another plugin hooks is one that the series changes."""

from __future__ import annotations

import ast

from kvgeom import install
from kvgeom.install import Manifest
from kvgeom.tree import Tree


def is_changed(tree: Tree, manifest: Manifest, target: str) -> bool:
    """`target`: a dotted name as SGLang's HookRegistry takes it; `tree` has the series applied."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        path = f"python/{'/'.join(parts[:cut])}.py"
        if path in manifest.files:
            before, names = install.original(tree, manifest, path), parts[cut:]
            return before is None or _code(before, names) != _code(tree.read(path), names)
    return False


def _code(source: bytes, names: list[str]) -> str | None:
    """The structure of a function or class, by its name in the module; None where it is not."""
    body: list[ast.stmt] = ast.parse(source).body
    node = None
    for name in names:
        node = next((n for n in body if getattr(n, "name", None) == name), None)
        if node is None:
            return None
        body = getattr(node, "body", [])
    return ast.dump(node)
