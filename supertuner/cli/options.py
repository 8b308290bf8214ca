"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[Path, typer.Argument(help="The configuration: JSON, YAML or TOML.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a setting, as a.b[0].c=value; may be repeated."),
]
SampleLimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Use only this many samples of each dataset, for a first try.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
