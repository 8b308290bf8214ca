"""`supertuner checkpoint`: list and verify the checkpoints of a run, and request one from a running job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.options import JsonOption
from supertuner.cli.run import NoWaitOption, RunArgument, TimeoutOption, request_and_print

app = typer.Typer(help="List and verify checkpoints, and request one from a running job.", no_args_is_help=True)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run folder for all of its checkpoints.")],
) -> None:
    """Verify every byte of checkpoints, load their adapters and count the keys. Exits with 1 if one is damaged."""
    from supertuner.api import checkpoints
    from supertuner.core.types import bytes_text

    damaged = False
    for checkpoint in checkpoints.verify(path, show_progress=True):
        for problem in checkpoint.problems:
            damaged = True
            typer.echo(f"damaged: {problem}", err=True)
        if not checkpoint.problems:
            typer.echo(f"{checkpoint.path}: intact, step {checkpoint.step}, {bytes_text(checkpoint.nbytes)}")
        for part, summary in checkpoint.trained_parts.items():
            typer.echo(f"  {part}: {summary}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def now(run: RunArgument, no_wait: NoWaitOption = False, timeout: TimeoutOption = None) -> None:
    """Request a checkpoint from a running job. It saves after its current window; the command prints the path."""
    request_and_print(run, "checkpoint", no_wait, timeout)


@app.command("ls")
def list_checkpoints(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, oldest first. Only file sizes are checked; `verify` checks the content."""
    from supertuner.api import checkpoints
    from supertuner.core.types import bytes_text

    found = checkpoints.find(run)
    if as_json:
        typer.echo(json.dumps([info.to_dict() for info in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(f"no checkpoints in {run}")
    for info in found:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.path.lstat().st_mtime))
        state = bytes_text(info.nbytes) if info.problem is None else "damaged"
        typer.echo(f"step {info.step:>8}  {state:>9}  {created}  {info.path}")
    for info in found:
        if info.problem is not None:
            typer.echo(info.problem, err=True)
