"""`supertuner checkpoint`: see and check a run's checkpoints, and ask a running job for one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.validate import NoWait, Run, Timeout, ask_and_tell

if TYPE_CHECKING:
    from supertuner.train.checkpoint.load import Found

app = typer.Typer(help="See and check checkpoints, and ask a running job for one.", no_args_is_help=True)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's: then all of its checkpoints.")],
) -> None:
    """Check every byte of a checkpoint, load its adapters and count their keys. Exit code 1 if one is damaged."""
    from supertuner.core.types import bytes_text
    from supertuner.sinks.console import Console
    from supertuner.tools.checkpoint_adapters import look
    from supertuner.train.checkpoint.load import read_manifest
    from supertuner.train.checkpoint.load import verify as problems_of

    damaged = 0
    with Console() as console:
        for folder in _folders(path):
            problems = problems_of(folder, console)
            looked = [] if problems else look(folder)
            problems += [problem for adapter in looked for problem in adapter.problems]
            damaged += bool(problems)
            for problem in problems:
                typer.echo(f"damaged: {problem}", err=True)
            if not problems:
                manifest = read_manifest(folder.resolve())
                typer.echo(f"{folder}: whole, step {manifest.step}, {bytes_text(manifest.nbytes)}")
                for adapter in looked:
                    typer.echo(f"  {adapter.part}: {adapter.said}")
    if damaged:
        raise typer.Exit(1)


@app.command()
def now(run: Run, no_wait: NoWait = False, timeout: Timeout = None) -> None:
    """Ask a running job to save a checkpoint after its window, and say where it is."""
    ask_and_tell(run, "checkpoint", no_wait, timeout)


@app.command("ls")
def list_checkpoints(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False
) -> None:
    """List a run's checkpoints, oldest first. Sizes are looked at, content is not: `verify` does that."""
    found = _found(run)
    if as_json:
        typer.echo(json.dumps([_record(one) for one in found], indent=2, ensure_ascii=False))
        return
    if not found:
        typer.echo(f"no checkpoints in {run}")
        return
    from supertuner.core.types import bytes_text

    for one in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.path.lstat().st_mtime))
        state = bytes_text(one.nbytes) if one.problem is None else "damaged"
        typer.echo(f"step {one.step:>8}  {state:>9}  {made}  {one.path}")
    for one in found:
        if one.problem is not None:
            typer.echo(one.problem, err=True)


def _folders(path: Path) -> list[Path]:
    from supertuner.core.errors import CheckpointError
    from supertuner.sinks.run_folder import RUN

    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; name a checkpoint's folder or a run's")
    if not (path / RUN).is_file():
        from supertuner.train.checkpoint.save import find

        return [one.path for one in find(path)] or [path]
    folders = [one.path for one in _found(path)]
    if not folders:
        raise CheckpointError(f"{path} has no checkpoints yet")
    return folders


def _found(run: Path) -> list[Found]:
    from supertuner.core.errors import RunFolderError
    from supertuner.sinks.run_folder import RUN
    from supertuner.train.checkpoint.load import find
    from supertuner.train.checkpoint.manifest import FOLDER

    if not (run / RUN).is_file():
        raise RunFolderError(f"{run} is not a run's folder: it has no {RUN}")
    return find(run / FOLDER)


def _record(one: Found) -> dict[str, object]:
    return {
        "path": str(one.path),
        "step": one.step,
        "nbytes": one.nbytes,
        "parts": list(one.parts),
        "problem": one.problem,
    }
