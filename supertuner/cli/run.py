"""`supertuner run` and `supertuner validate`: show a run folder, and send requests to a running job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.runs.requests import RequestKind

app = typer.Typer(help="Show runs.", no_args_is_help=True)

RunArgument = Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Leave the request in the run folder and do not wait.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="Stop waiting after this time. Default: wait until it is answered."),
]


@app.callback()
def group() -> None:
    """Show runs."""


@app.command()
def ls(
    folder: Annotated[Path, typer.Argument(help="The folder of the runs, or one run.", metavar="FOLDER")] = Path(
        "runs"
    ),
    as_json: JsonOption = False,
) -> None:
    """List runs: what each is doing, its step, its loss, the remaining time, and its newest samples."""
    from supertuner.runs.run_status import list_runs

    runs = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([run.to_dict() for run in runs], indent=2, ensure_ascii=False))
        return
    from supertuner.cli.run_display import STATUS_HEADINGS, status_row
    from supertuner.cli.tables import print_table

    print_table(STATUS_HEADINGS, map(status_row, runs), right_aligned=("step", "loss", "s/step", "remaining"))
    for run in runs:
        if run.problem:
            typer.echo(f"{run.name}: {run.problem}", err=True)


@app.command()
def show(
    run: RunArgument,
    as_json: JsonOption = False,
    everything: Annotated[bool, typer.Option("--all", help="Print all settings, decisions and figures.")] = False,
) -> None:
    """Show a run: its state, the settings that were chosen, warnings and where its files are; --all shows everything
    that it recorded."""
    from supertuner import open_run

    summary = open_run(run).summary()
    if as_json:
        typer.echo(json.dumps(summary.to_dict(), indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    from supertuner.cli.run_display import print_overview, print_run
    from supertuner.runs.run_status import read_status

    if everything:
        print_run(summary, Console(highlight=False))
    else:
        print_overview(summary, read_status(run), Console(highlight=False))


def validate(run: RunArgument, no_wait: NoWaitOption = False, timeout: TimeoutOption = None) -> None:
    """Request a validation from a running job: samples and the held-out loss. The result of the run does not change.

    The job answers after its current window. The command prints where the samples are.
    """
    request_and_print(run, "validate", no_wait, timeout)


def request_and_print(run: Path, kind: RequestKind, no_wait: bool, timeout_s: float | None) -> None:
    """Send the request, wait for the answer and print it. Exits with 1 if the job could not fulfil it."""
    from supertuner import send_request

    answer = send_request(
        run, kind, wait=not no_wait, timeout_s=timeout_s, report=lambda line: typer.echo(line, err=True)
    )
    if answer is None:
        return
    if answer.status != "done":
        typer.echo(answer.message, err=True)
        raise typer.Exit(1)
    typer.echo(answer.message)
    if answer.path is not None:
        typer.echo(answer.path)
