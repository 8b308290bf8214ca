"""`supertuner env`: the variables of a GH200 job as lines for a shell."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("env")(env)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print values, defaults and readers as JSON.")] = False,
) -> None:
    """Print the exports of a GH200 job, for eval "$(supertuner env)". What is set already keeps its value."""
    from supertuner.config.sources import gh200_exports as exports
    from supertuner.config.sources import environment

    environ = environment.current_environment()
    if not as_json:
        for line in exports.export_lines(environ):
            typer.echo(os.fsencode(line))  # a value need not be UTF-8, and comes out as it went in
        return
    values = exports.effective_values(environ)
    table = {
        export.name: {
            "value": values[export.name],
            "default": export.value,
            "set": export.name in environ,
            "setting": export.setting,
            "readers": export.readers,
        }
        for export in exports.GH200_EXPORTS
    }
    typer.echo(json.dumps(table, indent=2))
