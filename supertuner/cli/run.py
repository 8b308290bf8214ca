"""`supertuner run`: look at a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at runs.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at runs."""


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a run was given, what was decided and why, and which files were set aside."""
    from supertuner.runs import show as run_show

    view = run_show.read_run(run)
    if json:
        typer.echo(run_show.run_as_json(view))
        return
    from rich.console import Console

    run_show.print_run(view, Console(highlight=False))
