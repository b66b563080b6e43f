"""SGLang with the series, its installation untouched. On where kvgeom is installed as a wheel.

    kvgeom.pth    -> at_start: `serve` says which folder `import sglang` takes
    entry point   -> `check`, where SGLang loads its plugins: it was in time, and nothing interferes

What cannot run with the series does not run: SGLang logs an exception of a plugin and goes on, so
SystemExit ends the process. KVGEOM_PLUGIN=0 turns both off; so does SGLANG_PLUGINS without kvgeom.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import Version

from kvgeom import at_start
from kvgeom.errors import KvgeomError

_HANDED_DOWN = "KVGEOM_SERVED"  # from a server's first process to those that it starts
_SCHEDULER = "sglang.srt.managers.scheduler"
_GEOMETRY = "sglang.srt.configurator.page_geometry_check.check_page_geometry"
_holding = contextlib.ExitStack()  # the copy, while this process lives


@dataclass(frozen=True)
class Served:
    """`copy`: the patched package; "" where the series is applied in place, to `package`."""

    package: str
    release: str
    series: str
    copy: str

    def __str__(self) -> str:
        return f"series {self.series} on SGLang {self.release}"


_served: Served | None = None  # what this process imported
_is_first = True  # of the processes of a server


def is_off() -> bool:
    """By one of the two variables, or because this is no wheel."""
    if not at_start.IS_WHEEL:
        return True
    chosen = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    return os.environ.get("KVGEOM_PLUGIN") == "0" or (any(chosen) and "kvgeom" not in chosen)


def serve() -> Path | None:
    """The folder that `sglang` is imported from; None: where it is installed.

    Ends the process where the series cannot be served.
    """
    global _served, _is_first
    if is_off():
        return None
    with _ending():
        inherited = _inherited()
        _is_first, _served = inherited is None, inherited or _made()
        os.environ[_HANDED_DOWN] = json.dumps(asdict(_served))
    return Path(_served.copy) if _served.copy else None


def check() -> None:
    """SGLang's plugin. Ends the process unless it runs the series."""
    if is_off():
        return
    with _ending():
        served = _served or _in_place()
        _check_imports(served)
        _check_hooks_when_applied(served)
        _log_geometry(served)
    if _is_first:  # SGLang's logging is not set up yet
        how = f"from {served.copy}" if served.copy else "applied in place, the plugin does nothing"
        print(f"kvgeom: {served}, {how}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ending():
    """Ends the process on whatever goes wrong, with the reason."""
    try:
        yield
    except KvgeomError as error:
        reason = [f"error: {error.message}", error.way_out]
    except Exception as error:
        reason = [f"error: the series cannot be served: {error!r}"]
    else:
        return
    reason.append("KVGEOM_PLUGIN=0 starts SGLang without the series")
    raise SystemExit("\n".join(f"kvgeom: {line}" for line in reason if line)) from None


def _inherited() -> Served | None:
    """What the process that started this one found, where it is true here too."""
    from kvgeom import caching
    from kvgeom import tree as trees

    try:
        served = Served(**json.loads(os.environ.get(_HANDED_DOWN, "")))
        found = trees.find(None)
        if (served.package, served.release) != (str(found.package), str(found.release)):
            return None
        if served.copy:
            caching.hold(Path(served.copy).parent)
    except (ValueError, TypeError, OSError):
        return None
    return served


def _made() -> Served:
    """Looks at the installation; makes the copy where there is none that is right."""
    from kvgeom import actions, boot_tree, series
    from kvgeom import tree as trees

    stack, found = series.load(), trees.find(None)
    state, manifest = _state(stack, found)
    if state in (actions.TreeState.APPLIED, actions.TreeState.OTHER_SERIES):
        return Served(str(found.package), str(found.release), manifest.series, "")
    if state is not actions.TreeState.NOT_APPLIED:
        raise KvgeomError(
            f"the series is {state} (SGLang {found.release} in {found.package})",
            "`kvgeom doctor` says what to do",
        )
    copy = _holding.enter_context(boot_tree.patched(stack, found, _say))
    return Served(str(found.package), str(found.release), stack.id, str(copy.package))


def _state(stack, found):
    from kvgeom import actions, install

    manifest = install.read_manifest(found)
    return actions.inspect(stack, found, manifest)[0], manifest


def _say(text: str) -> None:
    if text not in ("comparing with the installation", "ready"):  # said at every start
        print(f"kvgeom: {text}", file=sys.stderr, flush=True)


def _in_place() -> Served:
    """For a process whose sglang did not come through `serve`."""
    from kvgeom import actions, series
    from kvgeom import tree as trees

    package = Path(sys.modules["sglang"].__file__).parent
    found = trees.find(package)
    state, manifest = _state(series.load(), found)
    if state not in (actions.TreeState.APPLIED, actions.TreeState.OTHER_SERIES):
        raise KvgeomError(
            f"sglang was imported from {package} before the plugin could patch it: another "
            "package imports it when Python starts, or it is installed in editable mode",
            f"`kvgeom apply --tree {package}` patches it in place",
        )
    return Served(str(package), str(found.release), manifest.series, "")


def _check_imports(served: Served) -> None:
    """Every module of SGLang comes from the copy, where there is one."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        ours = name.partition(".")[0] == "sglang" and file and served.copy
        if ours and not file.startswith(f"{served.copy}{os.sep}"):
            raise KvgeomError(
                f"{name} was imported from {file}, not from {served.copy} with the series",
                "start SGLang without what imports it from there",
            )


def _check_hooks_when_applied(served: Served) -> None:
    """Plugins that come after this one register hooks until SGLang applies them all."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_hooks = HookRegistry.apply_hooks

    def checked():
        with _ending():
            _check_hooks(served, list(HookRegistry._hooks))
        apply_hooks()

    HookRegistry.apply_hooks = checked


def _check_hooks(served: Served, targets: list[str]) -> None:
    """KvgeomError where another plugin hooks a function or class that the series changes."""
    from kvgeom import hooks, install
    from kvgeom.tree import Tree

    tree = Tree(Path(served.copy or served.package), Version(served.release))
    manifest = install.read_manifest(tree)
    for target in targets:
        ours = target == _GEOMETRY
        if not ours and manifest and hooks.is_changed(tree, manifest, target):
            raise KvgeomError(
                f"another plugin hooks {target}, which the series changes",
                "name the plugins to load, without that one or kvgeom: SGLANG_PLUGINS=NAME,...",
            )


def _log_geometry(served: Served) -> None:
    """One line for each pool when its boot check has passed, from the first rank."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(result, *, allocator, pool, is_draft_worker, **rest):
        import torch.distributed as ranks

        if not ranks.is_initialized() or ranks.get_rank() == 0:
            space, side = allocator.loc_space, "draft" if is_draft_worker else "target"
            rows = getattr(pool, "loc_rows", pool.size)
            logging.getLogger(__name__).info(
                f"kvgeom: {served}: {side} pool {rows} rows, allocator page {space.page_size}, "
                f"reach {space.reach}"
            )

    if _SCHEDULER in sys.modules:  # other processes have no pools
        HookRegistry.register(_GEOMETRY, after, HookType.AFTER)
