"""`supertuner stage`: bring a configuration's datasets into memory that all processes of this node share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[Path, typer.Argument(help="The configuration: JSON, YAML or TOML.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="A setting, as a.b[0].c=value; may be repeated."),
]


def register(app: typer.Typer) -> None:
    app.command("stage")(stage)


def stage(
    config: ConfigArgument,
    sets: SetOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many samples of each dataset, for a first try.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A broken file is an error; all are listed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Stage every dataset of CONFIG, or reuse what is staged already. Nothing else is started."""
    from supertuner.tools.session import load_command_config, open_session
    from supertuner.tools.staging import stage_all_datasets, stage_summary

    with open_session(load_command_config(config, sets or (), limit=limit, strict=strict)) as work:
        results = stage_all_datasets(work)
    if as_json:
        typer.echo(json.dumps([result.figures() for result in results], indent=2))
        return
    for result in results:
        typer.echo(stage_summary(result))
    typer.echo(f"run folder: {work.run_dir}")
