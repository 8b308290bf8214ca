"""`supertuner cache`: encode ahead of training, and see, check and prune what was encoded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.stage import Config, Sets

if TYPE_CHECKING:
    from supertuner.cache.inspect import Held

app = typer.Typer(help="Build, see, check and prune caches of encoded samples and captions.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@app.command()
def build(
    config: Config,
    sets: Sets = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check every byte of what is there, and encode what is damaged again.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stage CONFIG's datasets and encode what training will need of them. What is there already is kept."""
    from supertuner.tools.caches import build as build_caches
    from supertuner.tools.caches import built_line
    from supertuner.tools.session import load_narrowed

    found = build_caches(load_narrowed(config, sets or []), check=check)
    if as_json:
        typer.echo(json.dumps([built.figures() for built in found], indent=2))
        return
    for built in found:
        typer.echo(built_line(built))
    if not found:
        typer.echo('nothing is cached: cache_config has type "none" for samples and captions')


@app.command()
def verify(config: Config, sets: Sets = None) -> None:
    """Check every byte of CONFIG's caches, and say what of them is used, stale or missing. Exit code 1 if damaged."""
    from supertuner.tools.caches import line
    from supertuner.tools.caches import verify as verify_caches
    from supertuner.tools.session import load_narrowed

    state, problems = verify_caches(load_narrowed(config, sets or []))
    damaged = [(held, problem) for held, problem in zip(state.held, problems, strict=True) if problem is not None]
    for held, problem in zip(state.held, problems, strict=True):
        typer.echo(f"{line(held)}: {'whole' if problem is None else 'DAMAGED'}")
    _tell_missing(state.missing)
    for held, problem in damaged:
        typer.echo(f"{held.name}: damaged: {problem}", err=True)
    if any(not held.used for held, _ in damaged):
        typer.echo("nothing is used of some that are damaged; `supertuner cache prune` removes those", err=True)
    if any(held.used for held, _ in damaged):
        typer.echo("`supertuner cache build --check` encodes what is damaged again", err=True)
        raise typer.Exit(1)


@app.command("ls")
def list_caches(config: Config, sets: Sets = None, as_json: JsonOption = False) -> None:
    """List arenas of CONFIG's caches: what they hold, by which encoder it was made, and what CONFIG uses of it."""
    from supertuner.tools.caches import look, record
    from supertuner.tools.session import load_narrowed

    state = look(load_narrowed(config, sets or []))
    if as_json:
        typer.echo(json.dumps({"arenas": [record(held) for held in state.held], "missing": state.missing}, indent=2))
        return
    _show(state.held)
    _tell_missing(state.missing)


@app.command()
def prune(
    config: Config,
    sets: Sets = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove what is listed.")] = False,
) -> None:
    """List arenas of caches of which CONFIG needs nothing: stale, unused or damaged. With --yes, remove them."""
    from supertuner.tools.caches import line, look, prunable
    from supertuner.tools.caches import prune as remove
    from supertuner.tools.session import load_narrowed

    found = prunable(look(load_narrowed(config, sets or [])))
    if not found:
        typer.echo("nothing to prune")
        return
    if not yes:
        for held in found:
            typer.echo(line(held))
        typer.echo("nothing was removed; other configurations may use them: --yes removes them")
        return
    for held, why_not in remove(found):
        typer.echo(f"{'removed' if why_not is None else f'not removed ({why_not})'} {line(held)}")


def _tell_missing(missing: dict[str, int]) -> None:
    for what, count in missing.items():
        if count:
            typer.echo(f"{count} entries of {what} are missing; `supertuner cache build` or training encodes them")


def _show(arenas: tuple[Held, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from supertuner.core.types import bytes_text

    console = Console(highlight=False)
    if not arenas:
        console.print("nothing is cached")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("name", "entries", "used", "size", "", "encoder", "folder"):
        table.add_column(heading, justify="right" if heading in ("entries", "used", "size") else "left", no_wrap=True)
    for held in arenas:
        units = "" if held.info.units is None else str(held.info.units)
        size = bytes_text(held.info.nbytes)
        table.add_row(held.name, units, str(held.used), size, held.verdict, held.identity[:12], str(held.home.path))
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)  # a name that is folded cannot be copied
