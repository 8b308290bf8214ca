"""`supertuner train`: train what a configuration says, from its last checkpoint if it has one."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Annotated

import typer

from supertuner.cli.stage import ConfigArgument, SetOption


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    config: ConfigArgument,
    sets: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="latest|never|PATH", help="Where to go on from, instead of what checkpoints.resume says."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many samples of each dataset, for a first try.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Begin even if the forecast says that it cannot fit into memory.")
    ] = False,
) -> None:
    """Stage, cache and train what CONFIG says; validate, save and export on the way.

    Ctrl-C, SIGTERM and a terminal that is closed save and stop after the current window; the same command then goes on,
    to the bit as if nothing had happened.
    """
    from supertuner.config.sources.environment import current_environment
    from supertuner.config.sources.launcher import read_launcher_environment
    from supertuner.tools.session import load_command_config
    from supertuner.tools.training import train as run_training
    from supertuner.tools.training import training_summary

    result = run_training(load_command_config(config, sets or [], limit=limit), resume=resume, force=anyway)
    if read_launcher_environment(current_environment()).is_main_process:  # of many processes one speaks for all
        with suppress(OSError):  # whoever started it may be gone; how it ended is said by the exit code too
            typer.echo(training_summary(result))
    if result.stopped_by is not None:
        raise typer.Exit(128 + signal.Signals[result.stopped_by])
