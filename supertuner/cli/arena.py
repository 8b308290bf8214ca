"""`supertuner arena`: list, verify and remove the arenas of this user on this node."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from supertuner.arena.arena_info import ArenaInfo
    from supertuner.arena.home import ArenaHome

app = typer.Typer(help="List, verify and remove staged data of this node.", no_args_is_help=True)

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The folder of arenas. Default: this user's folder on tmpfs.", metavar="FOLDER"),
]


@app.command("ls")
def list_arenas(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List arenas: their size, whether a process uses them, and how long they stay."""
    arena_home = _open_home(home)
    infos = arena_home.list_arenas()
    if as_json:
        typer.echo(json.dumps([_record(info) for info in infos], indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not infos:
        console.print(f"no arenas in {arena_home.path}", soft_wrap=True)
        return
    table = _table(infos, str(arena_home.path))
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)  # do not wrap: users copy names from it
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
    from supertuner.core.errors import ArenaDamagedError
    from supertuner.sinks.console import ConsoleSink

    arena_home = _open_home(home)
    chosen = names or [info.name for info in arena_home.list_arenas() if info.state in ("sealed", "damaged")]
    damaged = 0
    with ConsoleSink() as console:
        for name in chosen:
            try:
                with arena_home.attach(name) as reader:
                    reader.verify(console)
                    typer.echo(f"{name}: intact, {len(reader)} units")
            except ArenaDamagedError as error:
                typer.echo(f"{name}: damaged: {error}", err=True)
                damaged += 1
    if damaged:
        raise typer.Exit(1)


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(help="The arenas to remove.", metavar="NAME...")],
    home: HomeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove arenas. An arena that a process uses is not removed."""
    from supertuner.core.types import bytes_text

    arena_home = _open_home(home)
    sizes = {info.name: info.nbytes for info in arena_home.list_arenas()}
    if not yes:
        listed = ", ".join(f"{name} ({bytes_text(sizes.get(name, 0))})" for name in names)
        typer.confirm(f"remove {listed} from {arena_home.path}?", abort=True)
    for name in names:
        arena_home.remove(name)
        typer.echo(f"removed {name}, {bytes_text(sizes.get(name, 0))}")


def _open_home(path: Path | None) -> ArenaHome:
    from supertuner.arena.home import ArenaHome, default_home
    from supertuner.core.errors import ArenaError

    if path is not None and not path.is_dir():  # listing must not create the folder
        raise ArenaError(f"--home {path} is not a folder; give the folder that arena.home names in the configuration")
    return ArenaHome(path or default_home())


def _record(info: ArenaInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "state": info.state,
        "nbytes": info.nbytes,
        "units": info.units,
        "created": info.created,
        "life": info.life,
        "users": info.users,
        "meta": info.meta,
        "problem": info.problem,
    }


def _table(infos: list[ArenaInfo], title: str) -> Table:
    from rich.table import Table

    from supertuner.core.types import bytes_text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("name", overflow="fold")  # never shortened: `arena rm` needs the whole name
    for heading in ("size", "units"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("state", "created", "stays"):
        table.add_column(heading, no_wrap=True)
    for info in infos:
        units = "" if info.units is None else str(info.units)
        created = "" if info.created is None else time.strftime("%m-%d %H:%M", time.localtime(info.created))
        state = "in use" if info.state == "sealed" and info.users else info.state
        table.add_row(info.name, bytes_text(info.nbytes), units, state, created, _lifetime_text(info))
    return table


def _lifetime_text(info: ArenaInfo) -> str:
    if info.state == "remains":
        return "until the next start"
    if info.life is None:
        return ""
    if isinstance(info.life, str):
        return {"until_removed": "until removed", "run": "while in use"}[info.life]
    return f"{info.life:g} h"
