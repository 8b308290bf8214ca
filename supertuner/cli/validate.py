"""`supertuner validate`: ask a running job for samples and held-out loss now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.runs.requests import RequestKind

RunArgument = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN", show_default=False)]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Leave the request there, and do not wait for the answer.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="Give up after so long; without it, wait until it is served."),
]


def register(app: typer.Typer) -> None:
    app.command("validate")(validate)


def validate(run: RunArgument, no_wait: NoWaitOption = False, timeout: TimeoutOption = None) -> None:
    """Ask a running job for samples after its window, and say where they are. The run's result does not change."""
    request_and_print(run, "validate", no_wait, timeout)


def request_and_print(run: Path, kind: RequestKind, no_wait: bool, timeout_s: float | None) -> None:
    """Ask, wait, print. Exit code 1 if it was not done."""
    from supertuner.runs.request_client import send_request

    answer = send_request(
        run, kind, wait=not no_wait, timeout_s=timeout_s, print_line=lambda line: typer.echo(line, err=True)
    )
    if answer is None:
        return
    if answer.status != "done":
        typer.echo(answer.message, err=True)
        raise typer.Exit(1)
    typer.echo(answer.message)
    if answer.path is not None:
        typer.echo(answer.path)
