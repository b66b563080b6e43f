"""The launch arguments of an SGLang server, from its process or from its start-up log.

Only what the faults of the series depend on is read; everything else is passed over.
"""

from __future__ import annotations

import io
import os
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path

from kvgeom.errors import KvgeomError

# SGLang's argument -> its other spellings on the command line.
_OPTIONS = {
    "dcp_size": ("--decode-context-parallel-size",),
    "page_size": (),
    "context_length": (),
    "attention_backend": (),
    "decode_attention_backend": (),
    "speculative_algorithm": (),
    "speculative_num_steps": (),
    "speculative_eagle_topk": (),
    "speculative_num_draft_tokens": (),
    "speculative_draft_attention_backend": (),
    "enable_hierarchical_cache": ("--enable-hicache",),
    "enable_unified_memory": (),
}
_FLAGS = {"enable_hierarchical_cache", "enable_unified_memory"}
_SPELLED = {
    spelling: name
    for name, others in _OPTIONS.items()
    for spelling in (f"--{name.replace('_', '-')}", *others)
}
_MARK = "server_args="


@dataclass(frozen=True)
class Launch:
    """What a server was started with. None: not given, so SGLang chose it."""

    source: str
    dcp: int
    page: int | None
    context: int | None
    backends: tuple[str, ...]  # of target and draft, those that are given
    algorithm: str | None
    steps: int | None
    topk: int | None
    draft_tokens: int | None
    hicache: bool
    unified: bool  # --enable-unified-memory
    served: bool = False  # its log has the line of a server with the series
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        spec = self.algorithm or "no speculation"
        if self.algorithm:
            shape = (self.steps, self.topk, self.draft_tokens)
            spec += " " + "/".join("?" if n is None else str(n) for n in shape)
        return ", ".join(
            [
                f"dcp {self.dcp}",
                f"page {self.page or 'not given'}",
                spec,
                f"context {self.context or 'the model has'}",
                f"HiCache {'on' if self.hicache else 'off'}",
                f"attention {' + '.join(self.backends) or 'not given'}",
            ]
        )


def from_arguments(arguments: list[str], source: str) -> Launch:
    """`arguments`: those of `sglang serve` or `python -m sglang.launch_server`."""
    values: dict[str, str | bool] = {}
    for at, argument in enumerate(arguments):
        spelling, equals, value = argument.partition("=")
        name = _option(spelling)
        if name in _FLAGS:
            values[name] = True
        elif name:
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            values[name] = value if equals else following
    in_file = any(a.partition("=")[0] == "--config" for a in arguments)
    note = "the options in its --config file are not read: --log reads them all"
    return _launch(values, source, (note,) if in_file else ())


def _option(spelling: str) -> str | None:
    """The argument that a word of the command line names; argparse takes beginnings too."""
    if spelling in _SPELLED or len(spelling) < 4 or not spelling.startswith("--"):
        return _SPELLED.get(spelling)
    meant = {name for known, name in _SPELLED.items() if known.startswith(spelling)}
    return meant.pop() if len(meant) == 1 else None


def from_log(path: Path) -> Launch:
    """The last start in a log; KvgeomError where there is none."""
    found, number, served = "", 0, False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for count, line in enumerate(file, start=1):
                if f"{_MARK}{{" in line or f"{_MARK}ServerArgs(" in line:
                    found, number, served = line, count, False
                served |= "kvgeom: series" in line
    except OSError as error:
        raise KvgeomError(
            f"--log {path} cannot be read: {error.strerror}", "give a server's log", exit_code=2
        ) from None
    if not found:
        raise KvgeomError(
            f"--log {path}: no line has `{_MARK}`, which SGLang logs when a server starts",
            "give the log from its beginning, of a server with --log-level info (the default)",
            exit_code=2,
        )
    values = _fields(found[found.index(_MARK) + len(_MARK) :])
    if "dcp_size" not in values:
        raise KvgeomError(
            f"--log {path}, line {number}: its `{_MARK}` has no dcp_size",
            "is the line whole, and SGLang's own?",
            exit_code=2,
        )
    return replace(_launch(values, f"{path}, line {number}"), served=served)


def _fields(text: str) -> dict[str, str | bool]:
    """The arguments in a printed dict or `ServerArgs(...)`, at its outer level."""
    values: dict[str, str | bool] = {}
    depth, before = 0, [tokenize.TokenInfo(0, "", (0, 0), (0, 0), "")] * 2
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
                if depth == 0:
                    break
            name, between = before[0].string.strip("'\""), before[1].string
            if depth == 1 and name in _OPTIONS and between in (":", "="):
                plain = token.string.strip("'\"")
                if plain != "None":
                    values[name] = plain == "True" if name in _FLAGS else plain
            before = [before[1], token]
    except (tokenize.TokenError, SyntaxError):  # what follows the arguments is no Python
        pass
    return values


def _launch(values: dict[str, str | bool], source: str, notes: tuple[str, ...] = ()) -> Launch:
    backends = [values.get(n) for n in _OPTIONS if n.endswith("attention_backend")]
    algorithm = str(values.get("speculative_algorithm", "")).upper()
    return Launch(
        source=source,
        dcp=_number(values, "dcp_size", source) or 1,
        page=_number(values, "page_size", source),
        context=_number(values, "context_length", source),
        backends=tuple(dict.fromkeys(str(b) for b in backends if b)),
        algorithm=algorithm if algorithm not in ("", "NONE") else None,
        steps=_number(values, "speculative_num_steps", source),
        topk=_number(values, "speculative_eagle_topk", source),
        draft_tokens=_number(values, "speculative_num_draft_tokens", source),
        hicache=bool(values.get("enable_hierarchical_cache")),
        unified=bool(values.get("enable_unified_memory")),
        notes=notes,
    )


_UNITS = {"Ki": 2**10, "Mi": 2**20, "k": 10**3, "M": 10**6}  # as SGLang reads --context-length


def _number(values: dict[str, str | bool], name: str, source: str) -> int | None:
    text = str(values.get(name, ""))
    unit = next((u for u in _UNITS if text.endswith(u)), "")
    try:
        return int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1)) if text else None
    except ValueError:
        raise KvgeomError(
            f"{source}: {name} is {text!r}, which is no number", "give SGLang a number", exit_code=2
        ) from None


def from_process(pid: int) -> Launch:
    """KvgeomError where the process is gone, may not be read, or is no SGLang server."""
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        raise KvgeomError(
            f"--pid {pid}: there is no such process", "`pgrep -af sglang` shows servers", 2
        ) from None
    except OSError as error:
        raise KvgeomError(
            f"--pid {pid}: its arguments cannot be read: {error.strerror}",
            "run kvgeom as that process's user, or give its log: --log FILE",
            exit_code=2,
        ) from None
    while words and not words[-1]:
        words.pop()
    if not words:
        raise KvgeomError(
            f"--pid {pid}: it has no arguments any more (it ended, or is a kernel thread)",
            "`pgrep -af sglang` shows servers",
            exit_code=2,
        )
    if words[0].startswith("sglang::"):  # SGLang's own title for the processes of a server
        raise KvgeomError(
            f"--pid {pid} is a part of a server ({words[0].strip()}), without its arguments",
            f"give the server itself: --pid {_parent(folder) or 'of its parent'}",
            exit_code=2,
        )
    arguments = server_arguments(words)
    if arguments is None:
        shown = " ".join(words)
        raise KvgeomError(
            f"--pid {pid} is no SGLang server: {shown[:80]}{'...' * (len(shown) > 80)}",
            "give the process of `sglang serve` or `python -m sglang.launch_server`; for a program "
            "that makes its own Engine give its log: --log FILE",
            exit_code=2,
        )
    return from_arguments(arguments, f"process {pid}")


def server_arguments(words: list[str]) -> list[str] | None:
    """What follows `sglang serve` or its like in a command line; None where there is no such."""
    starts = (at for at in range(len(words)) if _starts_server(words, at))
    return next((words[at + 1 :] for at in starts), None)


def _starts_server(words: list[str], at: int) -> bool:
    word, previous = os.path.basename(words[at]), words[at - 1] if at else ""
    if word == "serve":
        return os.path.basename(previous) in ("sglang", "sglang.cli.main", "main.py")
    return word == "launch_server.py" or words[at] == "sglang.launch_server"


def _parent(folder: Path) -> int | None:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
