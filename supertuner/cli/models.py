"""`supertuner models`: families and published models, what each does, and what its weights need."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from supertuner.cli.options import JsonOption
from supertuner.cli.tables import print_table


def models(
    family: Annotated[str | None, typer.Argument(help="Only this family.", show_default=False)] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also say whether a LoRA fits a machine, by the weights alone; or this."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List model families and published models: task, experts, adapter targets, size of the weights in 16 and 8 bits.

    Any model with the pipeline of a family can be trained; these can also be forecast without a download.
    """
    from supertuner.tools import model_list as tool

    families = tool.list_models(family)
    capacity = None if machine is None else tool.find_capacity(machine)
    if as_json:
        typer.echo(json.dumps(tool.models_json(families, capacity), indent=2, ensure_ascii=False))
        return
    sizes = ("a denoiser", "in 8 bits", "encoders")
    fit = () if capacity is None else ("a LoRA, by weights alone",)
    headings = ("family", "model", "makes", "experts", *sizes, *fit)
    print_table(headings, tool.model_rows(families, capacity), right_aligned=("experts", *sizes))
    typer.echo("")
    for name in families:
        typer.echo(f"{name}: {tool.family_text(name)}")
    if capacity is not None:
        typer.echo(f"\n{tool.machine_text(capacity)}\nby weights alone: {tool.LIMITS_OF_WEIGHTS}")
    typer.echo("\nnext: supertuner init --family FAMILY --data FOLDER")
