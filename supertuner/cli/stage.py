"""`supertuner stage`: bring a configuration's datasets into memory that all processes of this node share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from supertuner.config.data import Dataset
    from supertuner.config.tree import RunConfig
    from supertuner.data.result import StageResult


def register(app: typer.Typer) -> None:
    app.command("stage")(stage)


def stage(
    config: Annotated[Path, typer.Argument(help="The configuration: JSON, YAML or TOML.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, as a.b[0].c=value; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many samples of each dataset, for a first try.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A broken file is an error; all are listed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Stage every dataset of CONFIG, or reuse what is staged already. Nothing else is started."""
    from supertuner.config.load import load
    from supertuner.core.host import Host
    from supertuner.data.homes import home_of
    from supertuner.data.stage import Stager
    from supertuner.sinks.console import Console

    loaded = load(config, sets=sets or ())
    results = []
    with Console() as console:
        for note in loaded.notes:
            console.emit(note)
        for number, dataset in enumerate(loaded.config.datasets):
            home = home_of(dataset, loaded.config)
            stager = Stager(home, Host(), console, console, life=_life(loaded.config))
            results.append(stager.stage(_narrowed(dataset, limit, strict), f"datasets[{number}]"))
    if as_json:
        typer.echo(json.dumps([result.figures() for result in results], indent=2))
    else:
        for result in results:
            typer.echo(summary(result))


def summary(result: StageResult) -> str:
    """One dataset in a few lines, for people."""
    from supertuner.core.types import bytes_text

    what = f"{result.files} {result.kind} files" if result.files != 1 else f"1 {result.kind} file"
    how = "reused: nothing has changed" if result.reused else f"staged in {result.seconds:.2f} s"
    rate = "" if result.reused else f", {bytes_text(result.nbytes / max(result.seconds, 1e-9))}/s"
    lines = [
        f"{result.dataset}: {what}, {bytes_text(result.nbytes)}, {how}{rate}",
        f"  arena {result.arena} in {result.home}, {bytes_text(result.stored_bytes)}",
    ]
    if result.set_aside:
        lines.append(f"  {len(result.set_aside)} set aside")
    return "\n".join(lines)


def _narrowed(dataset: Dataset, limit: int | None, strict: bool) -> Dataset:
    given = {"limit": limit} if limit is not None else {}
    return dataset.model_copy(update={**given, **({"strict": True} if strict else {})})


def _life(config: RunConfig) -> str | float:
    """A dataset staged by this command is for a later run: "run" would end it with the command."""
    return "until_removed" if config.arena.keep == "run" else config.arena.keep
