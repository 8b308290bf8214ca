"""`supertuner arena`: list, verify and remove the arenas of this user on this node."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.options import JsonOption

if TYPE_CHECKING:
    from supertuner.api.arenas import ArenaInfo

app = typer.Typer(help="List, verify and remove staged data of this node.", no_args_is_help=True)

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The folder of arenas. Default: this user's folder on tmpfs.", metavar="FOLDER"),
]


@app.command("ls")
def list_arenas(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List arenas: their size, whether a process uses them, and how long they stay."""
    from supertuner.api import arenas
    from supertuner.cli.tables import print_table

    arena_home = arenas.open_home(home)
    infos = arena_home.list_arenas()
    if as_json:
        typer.echo(json.dumps([asdict(info) for info in infos], indent=2, ensure_ascii=False))
    elif not infos:
        typer.echo(f"no arenas in {arena_home.path}")
    else:
        headings = ("name", "size", "units", "state", "created", "stays")
        print_table(headings, map(_row, infos), ("size", "units"), title=str(arena_home.path))
        for info in infos:
            if info.problem:
                typer.echo(info.problem)


@app.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="The arenas to verify. Default: all.", metavar="[NAME]...")
    ] = None,
    home: HomeOption = None,
) -> None:
    """Verify the checksums of all bytes of arenas. Exits with 1 if an arena is damaged."""
    from supertuner.api import arenas

    damaged = False
    for arena in arenas.verify(arenas.open_home(home), names, show_progress=True):
        if arena.problem is None:
            typer.echo(f"{arena.name}: intact, {arena.units} units")
        else:
            damaged = True
            typer.echo(f"{arena.name}: damaged: {arena.problem}", err=True)
    if damaged:
        raise typer.Exit(1)


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(help="The arenas to remove.", metavar="NAME...")],
    home: HomeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove arenas. An arena that a process uses is not removed."""
    from supertuner.api import arenas
    from supertuner.core.types import bytes_text

    arena_home = arenas.open_home(home)
    sizes = {info.name: info.nbytes for info in arena_home.list_arenas()}
    if not yes:
        listed = ", ".join(f"{name} ({bytes_text(sizes.get(name, 0))})" for name in names)
        typer.confirm(f"remove {listed} from {arena_home.path}?", abort=True)
    for name in names:
        arena_home.remove(name)
        typer.echo(f"removed {name}, {bytes_text(sizes.get(name, 0))}")


def _row(info: ArenaInfo) -> list[str]:
    from supertuner.core.types import bytes_text

    units = "" if info.units is None else str(info.units)
    created = "" if info.created is None else time.strftime("%m-%d %H:%M", time.localtime(info.created))
    state = "in use" if info.state == "sealed" and info.users else info.state
    return [info.name, bytes_text(info.nbytes), units, state, created, _lifetime_text(info)]


def _lifetime_text(info: ArenaInfo) -> str:
    if info.state == "remains":
        return "until the next start"
    if info.life is None:
        return ""
    if isinstance(info.life, str):
        return {"until_removed": "until removed", "run": "while in use"}[info.life]
    return f"{info.life:g} h"
