"""`supertuner cache`: encode before training, and list, verify and prune caches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.options import ConfigArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from supertuner.cache.inventory import CacheArenaStatus

app = typer.Typer(help="Build, list, verify and prune caches of encoded samples and captions.", no_args_is_help=True)


@app.command()
def build(
    config: ConfigArgument,
    sets: SetOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Verify every byte of existing entries, and encode damaged ones again.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stage CONFIG's datasets and encode what training will need. Existing entries are kept."""
    from supertuner.api.session import load_command_config
    from supertuner.tools.caches import build_caches, describe_build

    built_caches = build_caches(load_command_config(config, sets or []), check=check)
    if as_json:
        typer.echo(json.dumps([built.to_dict() for built in built_caches], indent=2))
        return
    for built in built_caches:
        typer.echo(describe_build(built))
    if not built_caches:
        typer.echo('nothing to cache: cache_config sets both cache types to "none"')


@app.command()
def verify(config: ConfigArgument, sets: SetOption = None) -> None:
    """Verify every byte of CONFIG's caches; list which are used, stale or missing. Exits with 1 if one is damaged."""
    from supertuner.api.session import load_command_config
    from supertuner.tools.caches import describe_cache, verify_caches

    state, problems = verify_caches(load_command_config(config, sets or []))
    damaged = [(held, problem) for held, problem in zip(state.arenas, problems, strict=True) if problem is not None]
    for held, problem in zip(state.arenas, problems, strict=True):
        typer.echo(f"{describe_cache(held)}: {'intact' if problem is None else 'DAMAGED'}")
    _print_missing(state.missing)
    for held, problem in damaged:
        typer.echo(f"{held.name}: damaged: {problem}", err=True)
    if any(not held.used_entries for held, _ in damaged):
        typer.echo("CONFIG uses nothing of some damaged caches; `supertuner cache prune` removes them", err=True)
    if any(held.used_entries for held, _ in damaged):
        typer.echo("`supertuner cache build --check` encodes damaged entries again", err=True)
        raise typer.Exit(1)


@app.command("ls")
def list_caches(config: ConfigArgument, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """List the arenas of CONFIG's caches: their entries, the encoder that made them, and how many CONFIG uses."""
    from supertuner.api.session import load_command_config
    from supertuner.tools.caches import cache_record, inspect_caches

    state = inspect_caches(load_command_config(config, sets or []))
    if as_json:
        typer.echo(
            json.dumps({"arenas": [cache_record(held) for held in state.arenas], "missing": state.missing}, indent=2)
        )
        return
    _print_arenas(state.arenas)
    _print_missing(state.missing)


@app.command()
def prune(
    config: ConfigArgument,
    sets: SetOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove the listed arenas.")] = False,
) -> None:
    """List cache arenas that CONFIG does not need: stale, unused or damaged. With --yes, remove them."""
    from supertuner.api.session import load_command_config
    from supertuner.tools.caches import describe_cache, inspect_caches, prunable_caches, prune_caches

    prunable_arenas = prunable_caches(inspect_caches(load_command_config(config, sets or [])))
    if not prunable_arenas:
        typer.echo("nothing to prune")
        return
    if not yes:
        for arena in prunable_arenas:
            typer.echo(describe_cache(arena))
        typer.echo("nothing was removed; other configurations may use these arenas; --yes removes them")
        return
    for arena, why_not in prune_caches(prunable_arenas):
        typer.echo(f"{'removed' if why_not is None else f'not removed ({why_not})'} {describe_cache(arena)}")


def _print_missing(missing: dict[str, int]) -> None:
    for kind, count in missing.items():
        if count:
            typer.echo(f"{count} entries of {kind} are missing; `supertuner cache build` or training will encode them")


def _print_arenas(arenas: tuple[CacheArenaStatus, ...]) -> None:
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
    for arena in arenas:
        units = "" if arena.info.units is None else str(arena.info.units)
        size = bytes_text(arena.info.nbytes)
        table.add_row(
            arena.name,
            units,
            str(arena.used_entries),
            size,
            arena.usage,
            arena.encoder_fingerprint[:12],
            str(arena.home.path),
        )
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)  # do not wrap: users copy names from it
