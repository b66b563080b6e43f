"""`kvgeom boot`: the fault, the fix and the assertion, shown on SGLang's own engine.

step       runs it needs       what it claims
geometry   patched             the series boots, and every pool covers what indexes it
serve      patched, control    served to a full cache, with the tokens of a tp 1 run
refuse     refuse              with the fault put back, the engine refuses to start
overrun    overrun             with the assertion taken out too, the draft writes past its pool
rows       kvgeom/boot_rows.py requests to the context limit overrun neither row nor index buffer
tokens     no engine           published deployments take the KV memory that they are charged
"""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvgeom import boot_rows
from kvgeom.boot_specs import Device, Pair, Step, check_device, choose, engine_specs
from kvgeom.errors import KvgeomError

if TYPE_CHECKING:
    from kvgeom.boot_checks import Claim
    from kvgeom.boot_show import Steps
    from kvgeom.cpu_engine import EngineReport, EngineSpec, Session
    from kvgeom.cpu_engine.libraries import Libraries
    from kvgeom.deployment.published import Answers
    from kvgeom.series import Series
    from kvgeom.tree import Tree

_TIMEOUT_S = 300.0  # of one engine; a run takes 5 to 40 s on two cores
_RUNS = {
    Step.GEOMETRY: ("patched",),
    Step.SERVE: ("patched", "control"),
    Step.REFUSE: ("refuse",),
    Step.OVERRUN: ("overrun",),
    Step.ROWS: boot_rows.RUNS,
    Step.TOKENS: (),
}

_STOPS = {
    "refuse": "Draft pool paged by the scheduled page:",
    "overrun": "The same, the boot assertion taken out:",
    "rows-released": "SGLang as released, a tree draft at the context limit:",
    "rows-widened": "The same, only the row widened:",
}


def boot(
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks, 4 or 8.")] = 8,
    dcp: Annotated[int, typer.Option(help="Decode context parallel ranks, 4 or 8.")] = 8,
    pair: Annotated[
        Pair, typer.Option(help="Target and draft: Llama MQA with MQA, DeepSeek MLA with MHA.")
    ] = Pair.MQA,
    step: Annotated[
        list[Step] | None,
        typer.Option(
            help="Only this step; may be repeated.", show_default="every step of the pair"
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - for stdout."),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cuda: one device a rank, no stand-ins. Never run yet.")
    ] = Device.CPU,
    tree: Annotated[
        Path | None,
        typer.Option(
            "--tree",
            metavar="PATH",
            show_default="the installed SGLang",
            help="Folder that contains `sglang/`. It is copied, never changed.",
        ),
    ] = None,
) -> None:
    """Boot SGLang's own engine with the series applied, with no GPU, and show that it holds.

    Example: `kvgeom boot --pair mla --json result.json`

    Works on a private copy of the installed SGLang; the installation is only read.

    - geometry: every pool covers what indexes it, alike on all ranks
    - serve: a full cache, with the tokens and logprobs of a tp 1 run
    - refuse: with the fault put back, the engine does not start
    - overrun: with the assertion taken out too, the draft writes past its pool
    - rows: requests to the context limit overrun neither row nor index buffer (pair mqa)
    - tokens: five published deployments take the memory that they are charged (with pair mqa)

    Exit status: 0 all of it held; 1 something did not; 2 wrong arguments; 130 interrupted.
    """
    from kvgeom import series
    from kvgeom import tree as trees
    from kvgeom.boot_json import as_json, check_target, write
    from kvgeom.boot_show import show_summary
    from kvgeom.boot_tokens import show as show_tokens

    chosen = choose(step, pair)
    check_device(device, tp)
    specs = engine_specs(pair, tp, dcp, device) | boot_rows.specs(tp, dcp, device)
    specs = {name: specs[name] for name in dict.fromkeys(r for s in chosen for r in _RUNS[s])}
    target = check_target(json_file)
    to_stdout = json_file == "-"
    out = Console(stderr=to_stdout, highlight=False)
    started = time.monotonic()
    stack, found = series.load(), trees.find(tree)
    console = Console(stderr=True, highlight=False)
    reports, answers = run(stack, found, specs, console, Step.TOKENS in chosen)
    result = claims(chosen, reports, answers)
    out.print(
        f"SGLang {found.release}, pair {pair}, tp {tp}, dcp {dcp}, with "
        f"{', '.join(pr.id for pr in stack.prs)} applied to a copy of {found.package}",
        markup=False,
        soft_wrap=True,
    )
    show(out, reports)
    if answers:
        show_tokens(out, answers)
    seconds = time.monotonic() - started
    memory = max((r.peak_rss_mb for r in reports.values()), default=0) / 1024
    out.print(f"{seconds:.0f} s" + (f", {memory:.1f} GiB\n" if memory else "\n"))
    everything = as_json(stack, found, reports, answers, result, seconds)
    if to_stdout:
        print(everything)
    elif target:
        write(target, everything)
    show_summary(out, result)
    raise typer.Exit(0 if all(c.ok for c in result) else 1)


def run(
    stack: Series, found: Tree, specs: dict[str, EngineSpec], console: Console, tokens: bool
) -> tuple[dict[str, EngineReport], Answers | None]:
    """Run the engines, then plan the deployments for step `tokens`, all forked from one import of
    the libraries."""
    from kvgeom.cpu_engine import EngineSetupError
    from kvgeom.cpu_engine.gates import check_release
    from kvgeom.cpu_engine.libraries import libraries
    from kvgeom.deployment import published as deployments

    answers = None
    cuda = any(spec.device == "cuda" for spec in specs.values())  # not forked
    try:
        check_release(str(found.release))
        with nullcontext() if cuda else libraries() as running:
            reports = _run_engines(stack, found, specs, console, running)
            if tokens:
                answers = deployments.answers(stack, found, console, running=running)
    except EngineSetupError as error:
        raise KvgeomError(str(error)) from None
    return reports, answers


def _run_engines(
    stack: Series,
    found: Tree,
    specs: dict[str, EngineSpec],
    console: Console,
    running: Libraries | None,
) -> dict[str, EngineReport]:
    """One after the other, those of one copy all forked from one import of it."""
    from kvgeom.boot_show import Steps

    if not specs:  # the step of the tokens alone
        return {}
    copies: dict[str | None, list[str]] = {}
    for name in specs:
        copies.setdefault(boot_rows.STACK.get(name), []).append(name)
    steps = [f"copy{_which(last)}" for last in copies]
    steps += [s for last, names in copies.items() for s in (f"import{_which(last)}", *names)]
    device, reports = next(iter(specs.values())).device, {}
    with Steps(console, steps) as shown, ExitStack() as held:
        # All of them first: one copy's engines run while the next is imported.
        sessions = {
            last: _session(stack, found, shown, held, last, device, running) for last in copies
        }
        for last, names in copies.items():
            runs = {name: specs[name] for name in names}
            reports |= _run_on_one_copy(sessions[last], runs, shown, f"import{_which(last)}")
    return reports


def _which(last: str | None) -> str:
    """What the names of a copy's steps end with: `last` is the last PR in it."""
    return "" if last is None else f" up to {last}" if last else " of the release"


def _session(
    stack: Series,
    found: Tree,
    shown: Steps,
    held: ExitStack,
    last: str | None,
    device: str,
    running: Libraries | None,
) -> Session:
    """A copy and the start of its import; `held` ends them."""
    from kvgeom.boot_tree import patched
    from kvgeom.cpu_engine import session

    name = f"copy{_which(last)}"
    with shown.step(name) as on_event:
        copy = held.enter_context(
            patched(stack.upto(last), found, lambda text: on_event(name, text))
        )
    return held.enter_context(session(copy.package.parent, device, running))


def _run_on_one_copy(
    engines: Session, specs: dict[str, EngineSpec], shown: Steps, importing: str
) -> dict[str, EngineReport]:
    reports = {}
    with shown.step(importing) as on_event:
        engines.wait_ready(lambda stage, detail: on_event(importing, detail))
    for name, spec in specs.items():
        with shown.step(name) as on_event:
            reports[name] = engines.run(spec, on_event=on_event, timeout=_TIMEOUT_S)
    return reports


def claims(
    chosen: list[Step], reports: dict[str, EngineReport], answers: Answers | None
) -> list[Claim]:
    """What each chosen step came to."""
    from kvgeom import boot_checks as checks
    from kvgeom.boot_tokens import tokens_claim

    check = {
        Step.GEOMETRY: checks.geometry_claim,
        Step.SERVE: checks.serve_claim,
        Step.REFUSE: checks.refuse_claim,
        Step.OVERRUN: checks.overrun_claim,
        Step.ROWS: boot_rows.rows_claim,
        Step.TOKENS: lambda: tokens_claim(answers),
    }
    return [check[step](*(reports[name] for name in _RUNS[step])) for step in chosen]


def show(out: Console, reports: dict[str, EngineReport]) -> None:
    """Everything before the summary."""
    from kvgeom.boot_show import show_geometry, show_stop

    if "patched" in reports:
        show_geometry(out, reports["patched"])
    for name, title in _STOPS.items():
        if name in reports:
            show_stop(out, title, reports[name])
