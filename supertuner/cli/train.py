"""`supertuner train`, and the arguments of `train.py` in the GH200 fork of SimpleTuner, translated to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.options import ConfigArgument, SampleLimitOption, SetOption

CONFIG_FLAG = "--config"
VALUE_FLAGS = ("--set", "--resume", "--limit")
"""Options of `supertuner train` that take a value; they are passed on unchanged."""
SWITCH_FLAGS = ("--force", "--anyway", "--help", "--try")
VALUELESS_SETTINGS = ("enable_manual_validation",)
"""Flags of the forks that never take a value."""


def train(
    config: ConfigArgument,
    sets: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="latest|never|PATH", help="What to resume from; overrides checkpoints.resume."),
    ] = None,
    limit: SampleLimitOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the forecast says that the run does not fit into memory.")
    ] = False,
    anyway: Annotated[bool, typer.Option("--anyway", hidden=True, help="The name of --force in version 0.1.")] = False,
    is_trial: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Check everything without loading the model, and train a tiny model of its family instead; a minute. "
            "Exits with 2 if there is a problem.",
        ),
    ] = False,
) -> None:
    """Stage, cache and train as CONFIG says; validate, save checkpoints and export on the way.

    Ctrl-C, SIGTERM and a closed terminal save a checkpoint and stop after the current window. The same command then
    resumes, and its result is bit for bit that of an uninterrupted run.
    """
    from supertuner.api import training
    from supertuner.api.session import load_command_config
    from supertuner.config.sources.environment import current_environment
    from supertuner.config.sources.launcher import read_launcher_environment

    if is_trial:
        return try_run(config, sets or [], resume, limit, force or anyway)
    result = training.train(load_command_config(config, sets or [], limit=limit), resume=resume, force=force or anyway)
    if read_launcher_environment(current_environment()).is_main_process:  # rank 0 prints for all
        with suppress(OSError):  # standard output may be closed by now; the exit code still reports the result
            typer.echo(training.training_summary(result))
    if result.stopped_by is not None:
        raise typer.Exit(128 + signal.Signals[result.stopped_by])


def try_run(config: Path, sets: Sequence[str], resume: str | None, limit: int | None, force: bool) -> None:
    """`supertuner train CONFIG --try`."""
    from supertuner.cli.check_page import CheckPage
    from supertuner.config.sources.environment import current_environment
    from supertuner.config.sources.launcher import require_single_process
    from supertuner.core.errors import OptionError
    from supertuner.tools.trial.trial import TrialRequest, run_trial

    require_single_process(current_environment(), "train --try")
    if resume is not None:
        raise OptionError("--resume cannot be combined with --try: a trial is always a new run; leave one out")
    request = TrialRequest(config, tuple(sets), limit, force)
    page = CheckPage()
    result = run_trial(request, page.show)
    page.end(result.checks, f"{result.seconds:.0f} s")
    if result.training is not None and result.training.stopped_by is not None:
        raise typer.Exit(128 + signal.Signals[result.training.stopped_by])
    if result.has_problems:
        typer.echo("correct the problems (✗), then try again; nothing was loaded or replaced")
        raise typer.Exit(2)
    typer.echo(f"next: {request.next_command}")


def translate_arguments(arguments: Sequence[str]) -> list[str]:
    """Translate arguments of the forks' `train.py` to those of `supertuner`: `--config FILE` becomes the argument
    CONFIG, and every flag that `supertuner train` does not have becomes a setting, `--max_train_steps 10` →
    `--set max_train_steps=10`. An unknown setting is then refused as any `--set` is."""
    return ["train", *_translate(list(arguments))]


def _translate(remaining: list[str]) -> Iterator[str]:
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not name.startswith("--") or name in SWITCH_FLAGS:
            yield name + equals + value
            continue
        setting = name.removeprefix("--").replace("-", "_")
        if not equals and setting not in VALUELESS_SETTINGS and remaining and not _is_flag(remaining[0]):
            equals, value = "=", remaining.pop(0)
        if name == CONFIG_FLAG:
            yield from [value] if equals else []  # without a file, `supertuner train` reports the missing argument
        elif name in VALUE_FLAGS:
            yield from (name, value) if equals else (name,)
        else:
            yield from ("--set", f"{setting}={value if equals else 'true'}")


def _is_flag(text: str) -> bool:
    """Whether `text` is a flag; a negative number is a value."""
    return text.startswith("-") and not text[1:].replace(".", "", 1).isdecimal()
