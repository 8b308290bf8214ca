"""The command line: parses, calls one function, prints. Rooms are imported inside commands, so that --help is instant."""

from __future__ import annotations

import sys

import typer

from supertuner.cli import arena, config, preview, run, stage
from supertuner.core.errors import SuperTunerError

app = typer.Typer(
    name="supertuner",
    help="Fine-tune diffusion models on machines whose CPU and GPU share memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(config.app, name="config")
app.add_typer(arena.app, name="arena")
app.add_typer(run.app, name="run")
stage.register(app)
preview.register(app)


def main() -> None:
    """Run a command. A user's problem is a message and an exit code, never a traceback."""
    try:
        app()
    except SuperTunerError as error:
        typer.echo(str(error), err=True)
        sys.exit(error.exit_code)
