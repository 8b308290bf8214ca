"""`supertuner checkpoint`: see and check a run's checkpoints, and ask a running job for one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.validate import NoWaitOption, RunArgument, TimeoutOption, request_and_print

if TYPE_CHECKING:
    from supertuner.train.checkpoint.load import CheckpointInfo

app = typer.Typer(help="See and check checkpoints, and ask a running job for one.", no_args_is_help=True)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's: then all of its checkpoints.")],
) -> None:
    """Check every byte of a checkpoint, load its adapters and count their keys. Exit code 1 if one is damaged."""
    from supertuner.core.types import bytes_text
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.checkpoint_adapters import inspect_checkpoint
    from supertuner.train.checkpoint.load import read_manifest
    from supertuner.train.checkpoint.load import verify_checkpoint as problems_of

    damaged = 0
    with ConsoleSink() as console:
        for folder in _checkpoint_folders(path):
            problems = problems_of(folder, console)
            adapters = [] if problems else inspect_checkpoint(folder)
            problems += [problem for adapter in adapters for problem in adapter.problems]
            damaged += bool(problems)
            for problem in problems:
                typer.echo(f"damaged: {problem}", err=True)
            if not problems:
                manifest = read_manifest(folder.resolve())
                typer.echo(f"{folder}: whole, step {manifest.step}, {bytes_text(manifest.nbytes)}")
                for adapter in adapters:
                    typer.echo(f"  {adapter.part}: {adapter.summary}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def now(run: RunArgument, no_wait: NoWaitOption = False, timeout: TimeoutOption = None) -> None:
    """Ask a running job to save a checkpoint after its window, and say where it is."""
    request_and_print(run, "checkpoint", no_wait, timeout)


@app.command("ls")
def list_checkpoints(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False
) -> None:
    """List a run's checkpoints, oldest first. Sizes are looked at, content is not: `verify` does that."""
    checkpoints = _find_checkpoints(run)
    if as_json:
        typer.echo(json.dumps([_record(checkpoint) for checkpoint in checkpoints], indent=2, ensure_ascii=False))
        return
    if not checkpoints:
        typer.echo(f"no checkpoints in {run}")
        return
    from supertuner.core.types import bytes_text

    for one in checkpoints:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.path.lstat().st_mtime))
        state = bytes_text(one.nbytes) if one.problem is None else "damaged"
        typer.echo(f"step {one.step:>8}  {state:>9}  {created}  {one.path}")
    for one in checkpoints:
        if one.problem is not None:
            typer.echo(one.problem, err=True)


def _checkpoint_folders(path: Path) -> list[Path]:
    from supertuner.core.errors import CheckpointError
    from supertuner.sinks.run_folder import RUN_FILE

    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; name a checkpoint's folder or a run's")
    if not (path / RUN_FILE).is_file():
        from supertuner.train.checkpoint.durable_save import find_checkpoints

        return [checkpoint.path for checkpoint in find_checkpoints(path)] or [path]
    folders = [one.path for one in _find_checkpoints(path)]
    if not folders:
        raise CheckpointError(f"{path} has no checkpoints yet")
    return folders


def _find_checkpoints(run: Path) -> list[CheckpointInfo]:
    from supertuner.core.errors import RunFolderError
    from supertuner.sinks.run_folder import RUN_FILE
    from supertuner.train.checkpoint.load import find_checkpoints
    from supertuner.train.checkpoint.manifest import CHECKPOINTS_DIR

    if not (run / RUN_FILE).is_file():
        raise RunFolderError(f"{run} is not a run's folder: it has no {RUN_FILE}")
    return find_checkpoints(run / CHECKPOINTS_DIR)


def _record(checkpoint: CheckpointInfo) -> dict[str, object]:
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "nbytes": checkpoint.nbytes,
        "parts": list(checkpoint.parts),
        "problem": checkpoint.problem,
    }
