"""`supertuner init`: writes a configuration for a folder of samples and a machine; asks for what is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.estimate import MACHINE_NAMES
from supertuner.cli.options import SetOption
from supertuner.core.errors import OptionError
from supertuner.core.types import escape_for_terminal


def init(
    family: Annotated[str | None, typer.Option(help="The model family; `supertuner models` lists them.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder with your pictures or clips, and captions.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"{MACHINE_NAMES}, or this. Default: this machine if it has a GPU.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model on the hub, or a folder. Default: the family's first in `models`.")
    ] = None,
    trigger_word: Annotated[str | None, typer.Option(help="A word for what is learned, put into captions.")] = None,
    sets: SetOption = None,
    out: Annotated[Path, typer.Option(help="The file to write; an existing one is never overwritten.")] = Path(
        "run.yaml"
    ),
) -> None:
    """Write a commented configuration for your data, with settings that the forecast chose for a machine.

    Batch size, gradient checkpointing, 8-bit weights and resolution are tried from the best to the cheapest by
    forecasts, which take about a minute for a large model. On a terminal, it asks for what is not given.
    """
    from supertuner.sinks.console import ConsoleSink
    from supertuner.tools.init import run_init as tool

    tool.require_new_file(out)
    interactive = sys.stdin.isatty()
    if interactive:
        family, data, model, trigger_word = _ask(family, data, model, trigger_word)
    has_gpu = machine is None and tool.this_machine_has_gpu()
    if machine is None and interactive:
        machine = typer.prompt(f"machine ({MACHINE_NAMES}, this)", default="this" if has_gpu else "gh200-96")
    missing = [name for name, value in (("--family", family), ("--data", data)) if value is None]
    missing += ["--machine (this machine has no GPU)"] if machine is None and not has_gpu else []
    if missing or family is None or data is None:
        raise OptionError(f"missing: {', '.join(missing)}; give it as an option, or run init on a terminal")
    request = tool.InitRequest(family, data, machine or "this", out, model, trigger_word or None, tuple(sets or ()))
    with ConsoleSink() as console:
        result = tool.run_init(request, console)
    typer.echo("\n".join(map(escape_for_terminal, tool.summary_lines(result))))


def _ask(
    family: str | None, data: Path | None, model: str | None, trigger_word: str | None
) -> tuple[str, Path, str | None, str | None]:
    """Ask for what is None. A model is asked for only together with its family."""
    from supertuner.tools.model_list import list_models, require_family

    if family is None:
        family = require_family(_choose("family", list(list_models(None))))
        if model is None:
            model = _choose("model", list(list_models(family)[family]))
    if data is None:
        data = Path(typer.prompt("folder with your pictures or clips"))
        trigger_word = trigger_word or typer.prompt("trigger word (empty: none)", default="", show_default=False)
    return family, data, model, trigger_word


def _choose(what: str, names: Sequence[str]) -> str:
    """Ask for one of `names`, by its number or in full."""
    for number, name in enumerate(names, 1):
        typer.echo(f"  {number}  {name}")
    answer: str = typer.prompt(what, default="1")
    return names[int(answer) - 1] if answer.isdecimal() and 0 < int(answer) <= len(names) else answer
