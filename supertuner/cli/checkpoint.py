"""`supertuner checkpoint`: list and verify the checkpoints of a run, and request one from a running job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.options import JsonOption
from supertuner.cli.run import NoWaitOption, RunArgument, TimeoutOption, request_and_print

if TYPE_CHECKING:
    from supertuner.train.checkpoint.load import CheckpointInfo

app = typer.Typer(help="List and verify checkpoints, and request one from a running job.", no_args_is_help=True)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, or a run folder for all of its checkpoints.")],
) -> None:
    """Verify every byte of checkpoints, load their adapters and count the keys. Exits with 1 if one is damaged."""
    from supertuner.core.types import bytes_text
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.adapter_inspect import inspect_checkpoint
    from supertuner.train.checkpoint.load import read_manifest, verify_checkpoint

    damaged = 0
    with ConsoleSink() as console:
        for folder in _checkpoint_folders(path):
            problems = verify_checkpoint(folder, console)
            adapters = [] if problems else inspect_checkpoint(folder)
            problems += [problem for adapter in adapters for problem in adapter.problems]
            damaged += bool(problems)
            for problem in problems:
                typer.echo(f"damaged: {problem}", err=True)
            if not problems:
                manifest = read_manifest(folder.resolve())
                typer.echo(f"{folder}: intact, step {manifest.step}, {bytes_text(manifest.nbytes)}")
                for adapter in adapters:
                    typer.echo(f"  {adapter.part}: {adapter.summary}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def now(run: RunArgument, no_wait: NoWaitOption = False, timeout: TimeoutOption = None) -> None:
    """Request a checkpoint from a running job. It saves after its current window; the command prints the path."""
    request_and_print(run, "checkpoint", no_wait, timeout)


@app.command("ls")
def list_checkpoints(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, oldest first. Only file sizes are checked; `verify` checks the content."""
    checkpoints = _find_checkpoints(run)
    if as_json:
        typer.echo(json.dumps([_record(checkpoint) for checkpoint in checkpoints], indent=2, ensure_ascii=False))
        return
    if not checkpoints:
        typer.echo(f"no checkpoints in {run}")
        return
    from supertuner.core.types import bytes_text

    for info in checkpoints:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.path.lstat().st_mtime))
        state = bytes_text(info.nbytes) if info.problem is None else "damaged"
        typer.echo(f"step {info.step:>8}  {state:>9}  {created}  {info.path}")
    for info in checkpoints:
        if info.problem is not None:
            typer.echo(info.problem, err=True)


def _checkpoint_folders(path: Path) -> list[Path]:
    from supertuner.core.errors import CheckpointError
    from supertuner.sinks.run_folder import RUN_FILE

    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a checkpoint folder or a run folder")
    if not (path / RUN_FILE).is_file():
        from supertuner.train.checkpoint.load import find_checkpoints

        return [checkpoint.path for checkpoint in find_checkpoints(path)] or [path]
    folders = [info.path for info in _find_checkpoints(path)]
    if not folders:
        raise CheckpointError(f"{path} has no checkpoints yet")
    return folders


def _find_checkpoints(run: Path) -> list[CheckpointInfo]:
    from supertuner.runs.run_reader import open_run
    from supertuner.train.checkpoint.load import find_checkpoints
    from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR

    return find_checkpoints(open_run(run).path / CHECKPOINTS_DIR)


def _record(checkpoint: CheckpointInfo) -> dict[str, object]:
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "nbytes": checkpoint.nbytes,
        "parts": list(checkpoint.parts),
        "problem": checkpoint.problem,
    }
