"""`supertuner cache`: encode before training, and list, verify and prune caches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from supertuner.cli.options import ConfigArgument, JsonOption, SetOption

if TYPE_CHECKING:
    from supertuner.tools.caches import CacheState

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

    state, problems = verify_caches(load_command_config(config, sets or [], needs_data=False))
    checked = list(zip(state.arenas, problems, strict=True))
    damaged = [(arena, problem) for arena, problem in checked if problem is not None]
    for arena, problem in checked:
        typer.echo(f"{describe_cache(arena)}: {'intact' if problem is None else 'DAMAGED'}")
    _print_missing(state)
    for arena, problem in damaged:
        typer.echo(f"{arena.name}: damaged: {problem}", err=True)
    if any(not arena.used_entries for arena, _ in damaged):
        typer.echo("CONFIG uses nothing of some damaged caches; `supertuner cache prune` removes them", err=True)
    if any(arena.used_entries for arena, _ in damaged):
        typer.echo("`supertuner cache build --check` encodes damaged entries again", err=True)
        raise typer.Exit(1)


@app.command("ls")
def list_caches(config: ConfigArgument, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """List the arenas of CONFIG's caches: their entries, the encoder that made them, and how many CONFIG uses."""
    from supertuner.api.session import load_command_config
    from supertuner.cli.tables import print_table
    from supertuner.tools.caches import cache_record, cache_row, inspect_caches

    state = inspect_caches(load_command_config(config, sets or [], needs_data=False))
    if as_json:
        records = [cache_record(arena) for arena in state.arenas]
        content = {"arenas": records, "missing": state.missing, "unstaged": state.unstaged}
        typer.echo(json.dumps(content, indent=2))
        return
    if state.arenas:
        headings = ("name", "entries", "used", "size", "", "encoder", "folder")
        print_table(headings, map(cache_row, state.arenas), ("entries", "used", "size"))
    else:
        typer.echo("nothing is cached")
    _print_missing(state)


@app.command()
def prune(
    config: ConfigArgument,
    sets: SetOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove the listed arenas.")] = False,
) -> None:
    """List cache arenas that CONFIG does not need: stale, unused or damaged. With --yes, remove them."""
    from supertuner.api.session import load_command_config
    from supertuner.tools.caches import describe_cache, inspect_caches, prunable_caches, prune_caches

    state = inspect_caches(load_command_config(config, sets or [], needs_data=False))
    prunable = prunable_caches(state)
    _print_unstaged(state)
    if not prunable:
        typer.echo("nothing to prune")
        return
    if not yes:
        for arena in prunable:
            typer.echo(describe_cache(arena))
        typer.echo("nothing was removed; other configurations may use these arenas; --yes removes them")
        return
    for arena, why_not in prune_caches(prunable):
        typer.echo(f"{'removed' if why_not is None else f'not removed ({why_not})'} {describe_cache(arena)}")


def _print_missing(state: CacheState) -> None:
    for kind, count in state.missing.items():
        if count:
            typer.echo(f"{count} entries of {kind} are missing; `supertuner cache build` or training will encode them")
    _print_unstaged(state)


def _print_unstaged(state: CacheState) -> None:
    for dataset, reason in state.unstaged.items():
        text = f"which entries datasets[{dataset}] uses is unknown: {reason}"
        typer.echo(f"{text}; `supertuner stage` stages it. Entries that it may use are not pruned", err=True)
