"""`supertuner validate`: ask a running job for samples and held-out loss now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.runs.requests import Kind

Run = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN", show_default=False)]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Leave the request there, and do not wait for the answer.")]
Timeout = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="Give up after so long; without it, wait until it is served."),
]


def register(app: typer.Typer) -> None:
    app.command("validate")(validate)


def validate(run: Run, no_wait: NoWait = False, timeout: Timeout = None) -> None:
    """Ask a running job for samples after its window, and say where they are. The run's result does not change."""
    ask_and_tell(run, "validate", no_wait, timeout)


def ask_and_tell(run: Path, kind: Kind, no_wait: bool, timeout_s: float | None) -> None:
    """Ask, wait, print. Exit code 1 if it was not done."""
    from supertuner.runs.request_client import ask

    answer = ask(run, kind, wait=not no_wait, timeout_s=timeout_s, tell=lambda line: typer.echo(line, err=True))
    if answer is None:
        return
    if answer.status != "done":
        typer.echo(answer.message, err=True)
        raise typer.Exit(1)
    typer.echo(answer.message)
    if answer.path is not None:
        typer.echo(answer.path)
