"""`supertuner estimate`: what a run needs and how long it takes, before anything is loaded, on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.stage import ConfigArgument, SetOption

MACHINE_NAMES = "gh200-96, gh200-144, gb200, gb10, mi300a, h100-80-pcie, h100-80-sxm, a100-80, rtx-4090, rtx-5090"
# machines.MACHINES, spelt out because --help imports no room; a test compares them


def register(app: typer.Typer) -> None:
    app.command("estimate")(estimate)


def estimate(
    config: ConfigArgument,
    sets: SetOption = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{MACHINE_NAMES}, or this; without it, this one if it has a GPU, else gh200-96.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,…", help="Also with these values of a setting: train.batch_size=1,2,4; may be repeated."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of each dataset that is not on this machine.")
    ] = None,
    compute_share: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="Share of the machine's peaks that kernels reach, for the second column of times."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the memory of the step, and every what-if.")
    ] = None,
    no_advice: Annotated[bool, typer.Option("--no-advice", help="Do not say what single changes would do.")] = False,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="Exit 1 unless the run fits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Forecast CONFIG: memory of every phase, disk, time, what would make it fit. No weights, no GPU, no network.

    Everything is modelled. A first look at a large model takes a minute; traces are kept, so that the next is instant.
    """
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools import estimate as tool

    if plot is not None:
        tool.require_plot_path(plot)
    question = tool.EstimateRequest(
        config=config,
        sets=tuple(sets or ()),
        machine=machine,
        samples=samples,
        compute_share=compute_share,
        advise=not no_advice,
        what_ifs=tuple(what_if or ()),
    )
    with ConsoleSink() as console:
        forecast = tool.run_estimate(question, console)
        if plot is not None:
            tool.write_plot(forecast, plot)
    if as_json:
        typer.echo(json.dumps(tool.estimate_json(forecast), indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(tool.estimate_lines(forecast)))
        if plot is not None:
            typer.echo(f"picture: {plot}")
    if require_fit and not forecast.fits:
        raise typer.Exit(1)
