"""`supertuner estimate`: the memory and time that a run needs on a machine, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.options import ConfigArgument, JsonOption, SetOption

MACHINE_NAMES = "gh200-96, gh200-144, gb200, gb10, mi300a, h100-80-pcie, h100-80-sxm, a100-80, rtx-4090, rtx-5090"
# a copy of the names in machines.MACHINES, because --help must not import it; a test compares the two


def estimate(  # many parameters: one parameter per option
    config: ConfigArgument,
    sets: SetOption = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{MACHINE_NAMES}, or this. Default: this machine if it has a GPU, else gh200-96.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Also forecast these values of a setting: train.batch_size=1,2,4; may be repeated.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Number of samples to assume for each dataset that is not on this machine."),
    ] = None,
    compute_share: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="Share of peak performance that kernels reach, for the second column of times."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the memory of a step, and of every what-if.")
    ] = None,
    no_advice: Annotated[
        bool, typer.Option("--no-advice", help="Do not evaluate single changes of the settings.")
    ] = False,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="Exit with 1 unless the run fits.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forecast CONFIG: memory of every phase, disk, time, changes that make it fit. No weights, GPU or network needed.

    All figures are modelled. The first forecast of a large model takes half a minute; later ones reuse its trace.
    """
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools import estimate as tool

    if plot is not None:
        tool.require_plot_path(plot)
    request = tool.EstimateRequest(
        config=config,
        sets=tuple(sets or ()),
        machine=machine,
        samples=samples,
        compute_share=compute_share,
        advise=not no_advice,
        what_ifs=tuple(what_if or ()),
        plot=plot is not None,
    )
    with ConsoleSink() as console:
        forecast = tool.run_estimate(request, console)
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
