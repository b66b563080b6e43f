"""What the series comes to on one tree: every PR, every file before and after, every problem.

Pure: reads through the function it is given, writes nothing. One problem anywhere means that
nothing may be written.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import libcst as cst
from packaging.version import Version

from kvgeom.edits import Edit
from kvgeom.lock import UPSTREAM
from kvgeom.match import ancestors, digest
from kvgeom.rewrite import Outcome, State, evaluate
from kvgeom.series import Pr, Series, release_errors
from kvgeom.source import Problem, Source

Read = Callable[[str], bytes | None]  # repository path -> the tree's bytes, None where missing
Change = tuple[bytes | None, bytes]  # before (None: a new file), after
_Step = tuple[Source | None, Source | bytes]  # a Change that is not printed yet


class PrState(StrEnum):
    """Where a PR stands on a tree, going by its code alone."""

    NOT_APPLIED = "not applied"
    APPLIED = "applied"
    UPSTREAM = "already upstream"
    ABSENT = "absent"  # not for this release
    NOT_APPLICABLE = "not applicable"  # nothing of it goes into a tree of this kind
    PARTLY = "partly applied"


@dataclass(frozen=True)
class EditResult:
    edit: Edit
    state: State
    digest: str | None  # what series.lock should say; None: nothing to review


@dataclass(frozen=True)
class FileProblem:
    file: str
    edit: str  # "" where it is about the file
    why: str
    lines: tuple[int, ...] = ()
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        out = f"{self.file}: " + (f"edit '{self.edit}': " if self.edit else "") + self.why
        if self.lines:
            out += f" (line{'s' * (len(self.lines) > 1)} {', '.join(map(str, self.lines))})"
        return out + "".join(f"\n    near: {n}" for n in self.near)


@dataclass(frozen=True)
class PrPlan:
    pr: Pr
    state: PrState
    edits: tuple[EditResult, ...]
    steps: dict[str, _Step]

    @property
    def changes(self) -> dict[str, Change]:
        """This PR's part alone: what it changes in the files that the PRs before it left."""
        return {path: _printed(step) for path, step in self.steps.items()}


@dataclass(frozen=True)
class Plan:
    release: Version
    prs: tuple[PrPlan, ...]
    problems: tuple[FileProblem | str, ...]

    @cached_property
    def changes(self) -> dict[str, Change]:
        """Every file that changes, from the tree's own bytes to those of the whole stack."""
        out: dict[str, _Step] = {}
        for pr in self.prs:
            for path, (before, after) in pr.steps.items():
                out[path] = (out[path][0] if path in out else before, after)
        return {path: _printed(step) for path, step in out.items()}

    @property
    def digests(self) -> dict[tuple[str, str], str]:
        results = [r for pr in self.prs for r in pr.edits if r.digest]
        return {(r.edit.file, r.edit.id): r.digest for r in results}


def make(
    series: Series,
    read: Read,
    release: Version,
    *,
    writes: Callable[[str], bool] = lambda path: True,
    check_lock: bool = True,
) -> Plan:
    """Plan the stack. `writes` says which of the series' new files belong into the tree."""
    gc.disable()  # a million nodes, and none of them garbage until the plan is made
    try:
        made = _make(_Planner(series, read, release, check_lock), writes)
        if made.problems:  # in files that are read as a whole, they can name what comes close
            whole = frozenset(p.file for p in made.problems if isinstance(p, FileProblem))
            made = _make(_Planner(series, read, release, check_lock, whole), writes)
    finally:
        gc.enable()
    return made


def _make(planner: _Planner, writes: Callable[[str], bool]) -> Plan:
    series, release = planner.series, planner.release
    prs = tuple(planner.pr(pr, writes) for pr in series.prs)
    planner.problems += release_errors(series.prs, release)
    for path, change in Plan(release, prs, ()).changes.items():
        planner.check_compiles(path, change[1])
    return Plan(release, prs, tuple(planner.problems))


@dataclass
class _Planner:
    series: Series
    read: Read
    release: Version
    check_lock: bool
    whole: frozenset[str] = frozenset()
    sources: dict[str, Source | None] = field(default_factory=dict)
    new: dict[str, bytes | None] = field(default_factory=dict)
    problems: list[FileProblem | str] = field(default_factory=list)

    def pr(self, pr: Pr, writes: Callable[[str], bool]) -> PrPlan:
        live = pr.edits_for(self.release)
        results: list[EditResult] = []
        steps: dict[str, _Step] = {}
        for file in dict.fromkeys(e.file for e in pr.edits):
            before = self.source(file) if any(e.file == file for e in live) else None
            results += self.file_edits(pr, file, [e for e in live if e.file == file])
            after = self.sources.get(file)
            if before is not None and after is not before:
                steps[file] = (before, after)
        states = [r.state for r in _counted(results)]
        # A PR that is upstream already has its tests there too.
        new_files = {} if states and {*states} == {State.UPSTREAM} else pr.files
        for path, data in new_files.items():
            if pr.live(self.release) and writes(path):
                states.append(self.new_file(path, data, steps))
        state = _pr_state(states) if pr.live(self.release) else PrState.ABSENT
        if state is PrState.PARTLY:
            done = [r.edit.id for r in _counted(results) if r.state is State.APPLIED]
            self.problems.append(
                f"PR '{pr.id}' is partly in place already, and not by kvgeom"
                + (f" (edits {', '.join(done)})" if done else "")
            )
        return PrPlan(pr, state, tuple(results), steps)

    def siblings(self, file: str) -> tuple[Edit, ...]:
        return tuple(e for pr in self.series.prs for e in pr.edits if e.file == file)

    def source(self, file: str) -> Source | None:
        """The file as the stack up to here leaves it."""
        if file not in self.sources:
            raw = self.read(file)
            self.sources[file] = None
            if raw is None:
                self.problems.append(FileProblem(file, "", "SGLang has no such file here"))
            else:
                try:
                    edits = None if file in self.whole else self.siblings(file)
                    self.sources[file] = Source.parse(raw, edits)
                except Problem as err:
                    self.problems.append(FileProblem(file, "", err.why))
        return self.sources[file]

    def file_edits(self, pr: Pr, file: str, live: list[Edit]) -> list[EditResult]:
        """One PR's edits of one file. Imports come last: they go with the edits that use them."""
        every = [e for e in pr.edits if e.file == file]
        found: dict[str, EditResult] = {}
        for edit in sorted(every, key=lambda e: e.op == "import"):
            users = [r.state for r in found.values() if r.edit.op != "import"]
            if edit not in live:
                found[edit.id] = EditResult(edit, State.OTHER_RELEASE, None)
            elif edit.op == "import" and users and not {State.TO_APPLY, State.APPLIED} & {*users}:
                idle = State.UPSTREAM if State.UPSTREAM in users else State.OTHER_RELEASE
                found[edit.id] = EditResult(edit, idle, None)
            elif self.sources.get(file) is not None:
                result = self.edit(edit)
                if result:
                    found[edit.id] = result
        return [found[e.id] for e in every if e.id in found]

    def edit(self, edit: Edit) -> EditResult | None:
        source, siblings = self.sources[edit.file], self.siblings(edit.file)
        try:
            outcome = evaluate(source, edit, siblings)
        except Problem as err:
            self.problems.append(FileProblem(edit.file, edit.id, err.why, err.lines, err.near))
            return None
        reviewed = scope_digest(source, edit, outcome)
        if outcome.state is State.TO_APPLY and reviewed and self.check_lock:
            self.check_reviewed(source, edit, outcome, reviewed)
        self.sources[edit.file] = outcome.source
        return EditResult(edit, outcome.state, reviewed)

    def check_reviewed(self, source: Source, edit: Edit, outcome: Outcome, now: str) -> None:
        locked = self.series.lock.digest(edit.file, edit.id, self.release)
        if locked == now:
            return
        if locked is None:
            why = f"series.lock has no review of it for {self.release}"
        elif locked == UPSTREAM:
            why = f"series.lock has it as already upstream in {self.release}, and it is not here"
        else:
            why = "the code around its anchor is not the code that was reviewed"
        lines = source.lines([f.node for f in outcome.sites])
        self.problems.append(FileProblem(edit.file, edit.id, why, lines))

    def new_file(self, path: str, data: bytes, steps: dict) -> State:
        if path not in self.new:
            self.new[path] = self.read(path)
        have = self.new[path]
        if have is None:
            steps[path] = (None, data)
            self.new[path] = data
            return State.TO_APPLY
        if have == data:
            return State.APPLIED
        self.problems.append(FileProblem(path, "", "SGLang has another file of this name"))
        return State.TO_APPLY

    def check_compiles(self, path: str, data: bytes) -> None:
        if path.endswith(".py"):
            try:
                compile(data, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as err:
                line = (err.lineno,) if getattr(err, "lineno", None) else ()
                why = f"the edited file does not compile: {err}"
                self.problems.append(FileProblem(path, "", why, line))


def _printed(step: _Step) -> Change:
    before, after = step
    return before and before.raw, after if isinstance(after, bytes) else after.raw


def _counted(results: list[EditResult]) -> list[EditResult]:
    """The edits that tell where a PR stands: an import may stand there for another's sake."""
    live = [r for r in results if r.state is not State.OTHER_RELEASE]
    only_imports = all(r.edit.op == "import" for r in live)
    return [r for r in live if only_imports or r.edit.op != "import" or r.state is State.TO_APPLY]


def _pr_state(states: list[State]) -> PrState:
    seen = set(states)
    if not seen:
        return PrState.NOT_APPLICABLE
    if seen == {State.UPSTREAM}:
        return PrState.UPSTREAM
    if State.TO_APPLY not in seen:
        return PrState.APPLIED
    return PrState.PARTLY if State.APPLIED in seen else PrState.NOT_APPLIED


def scope_digest(source: Source, edit: Edit, outcome: Outcome) -> str | None:
    """What a reviewer looked at: the code that the anchors of `edit` stand in.

    That is the outermost function around each anchor, in the file as released, so that the other
    edits of the series in that function do not change it. An anchor in no function counts with its
    statement in the module or class body; a definition that is added, with the names of its scope
    and neighbour only. None where nothing of SGLang's is around: an import, our own code.
    """
    if outcome.state is State.UPSTREAM:
        return UPSTREAM
    if edit.op == "import":
        return None
    canons = []
    for site in outcome.sites:
        path = [site.node, *ancestors(site.chain)]
        if outcome.beside:
            canons.append(("define", edit.scopes[0], site.node.name.value))
            continue
        names = [n for n in path if isinstance(n, (cst.FunctionDef, cst.ClassDef))][::-1]
        first = next((i for i, n in enumerate(names) if isinstance(n, cst.FunctionDef)), None)
        if first is not None:
            dotted = ".".join(n.name.value for n in names[: first + 1])
            released = source.pristine.scopes(dotted)
            canons += [source.canons(s.node) for s in released[:1]]
        else:
            blocks = (cst.Module, cst.IndentedBlock)
            at = next(i for i, n in enumerate(path) if isinstance(n, blocks))
            canons.append(source.canons(path[max(at - 1, 0)]))
    return digest(list(dict.fromkeys(canons))) if canons else None
