"""`kvgeom plan`: the KV page geometry of a launch command, without a GPU."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvgeom.deployment.spec import GPU_ARCH, GPU_MEMORY, GpuArch
from kvgeom.errors import KvgeomError

if TYPE_CHECKING:
    from kvgeom.deployment.spec import Request, TreePlan
    from kvgeom.series import Series
    from kvgeom.tree import Tree

RELEASES = ("0.5.21", "0.5.22", "0.5.23")
_EXIT = {"safe": 0, "unsafe": 1}


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGUMENTS",
            show_default=False,
            help="The arguments of `sglang serve`, or the whole command, after plan's own options.",
        ),
    ] = None,
    published: Annotated[
        bool,
        typer.Option("--published", help="KV tokens per GPU of five published deployments."),
    ] = False,
    gpu_memory: Annotated[
        float, typer.Option(metavar="GIB", min=1, help="Memory of one GPU; an H200 has 141.")
    ] = GPU_MEMORY,
    gpu_arch: Annotated[GpuArch, typer.Option(help="sm90: Hopper, sm100: Blackwell.")] = GPU_ARCH,
    weights: Annotated[
        float,
        typer.Option(
            metavar="GIB", min=0, show_default="not counted", help="What weights take of a GPU."
        ),
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a script to read.")
    ] = False,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw it into FILE too, and replace FILE.")
    ] = None,
    tree: Annotated[
        Path | None,
        typer.Option(
            "--tree",
            metavar="PATH",
            show_default="the installed SGLang",
            help="Folder that contains `sglang/`. It is only read.",
        ),
    ] = None,
) -> None:
    """Tell whether a launch command's KV pools and rows cover what indexes them; needs no GPU.

    Example: `kvgeom plan -- --model-path deepseek-v3 --tp-size 8 --dcp-size 8`

    Parsing, validation, configurators, pools and allocator are SGLang's own (0.5.21 to 0.5.23), on
    the release as it is and with the series; tensors have no bytes, and only config.json is read.
    A model is a local folder, or one of these public configurations: deepseek-v3, glm-5.2,
    glm-5.2-dspark, gpt-oss-120b, gpt-oss-120b-eagle3, kimi-linear-48b, kimi-linear-48b-dspark,
    llama-3.1-70b, llama-3.1-70b-eagle3.

    --published prints Markdown: the KV tokens that a GPU gets as released and with the series, and
    the bytes that a token is charged and takes, target and draft.

    Exit status: 0 safe; 1 unsafe, on the release as it is; 2 wrong arguments, refused by SGLang, or
    not covered by a plan.
    """
    from kvgeom import series
    from kvgeom import tree as trees
    from kvgeom.boot_json import check_target, write
    from kvgeom.deployment import published as deployments
    from kvgeom.deployment import show as shown
    from kvgeom.deployment.spec import Request
    from kvgeom.deployment.svg import picture
    from kvgeom.deployment.verdict import verdict
    from kvgeom.launch import server_arguments

    _check_choice(arguments, published, svg, weights)
    target = check_target(svg, "--svg")
    found = trees.find(tree)
    _check_release(found)
    console = Console(stderr=True, highlight=False)
    if published:
        answers = deployments.answers(series.load(), found, console, gpu_memory, str(gpu_arch))
        table = json.dumps(deployments.as_dict(*answers, str(found.package)), indent=2) + "\n"
        print(table if as_json else deployments.markdown(*answers), end="")
        return
    if len(arguments) == 1:  # a quoted command
        arguments = shlex.split(arguments[0])
    after = server_arguments(arguments)
    arguments = arguments if after is None else after
    request = Request(arguments, gpu_memory, str(gpu_arch), weights)
    installed, with_series = _plans(request, series.load(), found, console)
    if as_json:
        answer = shown.as_dict(request, installed, with_series, str(found.package))
        print(json.dumps(answer, indent=2))
    else:
        shown.show(Console(highlight=False), request, installed, with_series)
    if target:
        write(target, picture(installed, with_series))
    raise typer.Exit(_EXIT.get(verdict(installed).word, 2))


def _check_choice(
    arguments: list[str] | None, published: bool, svg: str | None, weights: float
) -> None:
    """KvgeomError (2) unless there is one thing to plan."""
    if published and (arguments or svg or weights):
        raise KvgeomError(
            "--published has its own launch commands and weights, and no picture",
            "leave out --weights, --svg and what follows --",
            exit_code=2,
        )
    if not (published or arguments):
        raise KvgeomError(
            "Missing argument '-- ARGUMENTS'",
            "give the arguments of `sglang serve` after --, or --published",
            exit_code=2,
        )


def _check_release(found: Tree) -> None:
    """KvgeomError (2) for a release whose argument parsing and configurators are not known here."""
    if str(found.release) not in RELEASES:
        raise KvgeomError(
            f"kvgeom plan knows SGLang {', '.join(RELEASES)}, this tree is {found.release}",
            "install a known release or point --tree at one",
            exit_code=2,
        )


def _plans(
    request: Request, stack: Series, found: Tree, console: Console
) -> tuple[TreePlan, TreePlan]:
    """What the tree makes of the command as it is, and what a copy with the series does."""
    from kvgeom.boot_show import Steps
    from kvgeom.boot_tree import patched
    from kvgeom.deployment.run import planner

    steps = first, copying, second = "as it is", "copy", "with the series"
    with ExitStack() as held, planner() as ask, Steps(console, list(steps)) as shown:

        def asked(name: str, package: Path) -> TreePlan:
            with shown.step(name) as on_event:
                on_event(name, "SGLang parses, resolves and builds")
                return ask(package, request)[0]

        installed = asked(first, found.package)
        _check_planned(installed)
        with shown.step(copying) as on_event:
            copy = held.enter_context(patched(stack, found, lambda text: on_event(copying, text)))
        return installed, asked(second, copy.package)


def _check_planned(installed: TreePlan) -> None:
    """KvgeomError (2) for what is no launch command, and for one that a plan does not cover."""
    if installed.stop is None or installed.stop.by not in ("arguments", "kvgeom"):
        return
    if installed.stop.by == "arguments":
        raise KvgeomError(
            f"sglang serve: {installed.stop.message}",
            "`sglang serve --help` lists its arguments",
            2,
        )
    raise KvgeomError(installed.stop.message, exit_code=2)
