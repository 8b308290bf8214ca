"""`supertuner adapter`: see what an adapter's file is, write it for other programs, and merge it into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from supertuner.train.export.adapter_files import AdapterFile

app = typer.Typer(help="Inspect, convert and merge files of adapters.", no_args_is_help=True)

SHOWN = 2000
"""Characters of a text of metadata: kohya's trainers put whole lists of tags into it."""
File = Annotated[Path, typer.Argument(help="A .safetensors file of an adapter.", metavar="FILE")]
Family = Annotated[str | None, typer.Option("--family", help="The model's family, where its layers leave it open.")]
Expert = Annotated[
    str | None, typer.Option("--expert", help="high_noise or low_noise, where neither keys nor name say it.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Where to; without it, beside FILE.", metavar="PATH")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
Partial = Annotated[bool, typer.Option("--partial", help="Leave out keys that are not understood.")]


@app.command()
def inspect(
    file: File,
    family: Family = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, metadata included.")] = False,
) -> None:
    """Scheme, experts, ranks, norms and origin of an adapter. Exit code 1 if some of its values are not numbers."""
    from supertuner.tools.adapter_inspect import inspect as inspected
    from supertuner.tools.adapter_inspect import record
    from supertuner.train.export.adapter_files import open_adapter

    opened = open_adapter(file, family)
    found = record(opened, inspected(opened))
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _tell(found)
    if found["not_finite"]:
        typer.echo(f"{len(opened.entries)} tensors, of which these are not finite: {found['not_finite']}", err=True)
        raise typer.Exit(1)


@app.command()
def convert(
    file: File,
    to: Annotated[str, typer.Option("--to", help="A scheme's name; `supertuner adapter schemes` lists them.")],
    out: Out = None,
    expert: Expert = None,
    family: Family = None,
    partial: Partial = False,
    force: Force = False,
) -> None:
    """Write an adapter's file in another program's names."""
    from supertuner.core.errors import ModelError
    from supertuner.models.adapters.keys_schemes import SCHEMES
    from supertuner.train.export.adapter_files import convert as converted

    if to not in SCHEMES:
        raise ModelError(f"--to is {to!r}; there are {', '.join(SCHEMES)}")
    opened = _opened(file, family, expert, partial)
    made = out or file.with_name(f"{file.stem}.{to}.safetensors")
    count = converted(opened, SCHEMES[to], made, overwrite=force, family=family)
    typer.echo(f"{made}: {count} tensors, {opened.reading.scheme.name} to {to}; {opened.reading.report()}")


@app.command()
def export(
    file: File,
    program: Annotated[str, typer.Option("--for", help="diffusers or comfyui.", metavar="PROGRAM")],
    out: Out = None,
    expert: Expert = None,
    family: Family = None,
    partial: Partial = False,
    force: Force = False,
) -> None:
    """Write an adapter for a program that loads it: one file per expert, in the names which that program reads."""
    from supertuner.tools.adapter_export import export as exported

    opened = _opened(file, family, expert, partial)
    for made, count in exported(opened, program, out, overwrite=force, family=family):
        typer.echo(f"{made}: {count} tensors for {program}")
    typer.echo(opened.reading.report())


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="One file, or one for each expert.", metavar="FILE...")],
    base: Annotated[Path, typer.Option("--base", help="The folder of a diffusers pipeline.", metavar="FOLDER")],
    out: Annotated[Path, typer.Option("--out", help="The new folder.", metavar="FOLDER")],
    strength: Annotated[float, typer.Option("--strength", help="1: the adapter as trained.")] = 1.0,
    expert: Expert = None,
    family: Family = None,
) -> None:
    """Write a model's folder anew with adapters merged into it. The base stays as it is."""
    from supertuner.tools.adapter_merge import merge as merged

    opened = [_opened(file, family, expert, partial=False) for file in files]
    for part, count in merged(opened, base, out, strength).items():
        said = f"{count} layers changed" if count else "as in the base: no FILE is of this expert"
        typer.echo(f"{out / part}: {said}")


@app.command()
def schemes() -> None:
    """List the schemes, each with a key of it."""
    from supertuner.models.adapters.keys_schemes import SCHEMES
    from supertuner.tools.adapter_export import example

    for name, scheme in SCHEMES.items():
        typer.echo(f"{name:34} {example(scheme)}")


def _opened(file: Path, family: str | None, expert: str | None, partial: bool) -> AdapterFile:
    from supertuner.core.errors import ModelError
    from supertuner.train.export.adapter_files import ENDINGS, open_adapter, require_scaled, with_expert

    if expert is not None and expert not in ENDINGS.values():
        raise ModelError(f"--expert is {expert!r}; there are {', '.join(ENDINGS.values())}")
    require_scaled(file)
    opened = open_adapter(file, family)
    if opened.reading.unknown and not partial:
        raise ModelError(f"{file}: {opened.reading.report()}; with --partial they are left out")
    return with_expert(opened, expert)


def _tell(found: dict[str, Any]) -> None:
    from supertuner.core.types import bytes_text

    counted = {
        name: ", ".join(f"{one} ({n})" for one, n in found[name].items()) for name in ("kinds", "ranks", "scales")
    }
    typer.echo(f"{found['file']}: {bytes_text(found['nbytes'])}, {', '.join(found['dtypes'])}")
    typer.echo(f"  scheme    {found['scheme']}; family {' or '.join(found['families'])}")
    typer.echo(f"  expert    {' and '.join(found['experts']) or 'not said'}")
    typer.echo(
        f"  layers    {counted['kinds']}; rank {counted['ranks'] or 'none'}; scale {counted['scales'] or 'none'}"
    )
    if found["norm"] is not None:
        largest = ", ".join(f"{layer} {norm:.3g}" for layer, norm in found["largest"].items())
        typer.echo(f"  norm      {found['norm']:.4g} in all; largest: {largest}")
    loads = [family for family, reads in found["comfyui"].items() if reads]
    typer.echo(f"  ComfyUI   {'reads these names' if loads else 'does not read these names: see `adapter export`'}")
    typer.echo(f"  keys      {found['matched']} of {found['keys']} matched")
    for key, why in found["unknown"].items():
        typer.echo(f"            {key}: {why}")
    typer.echo(f"  base      {found['base_model'] or 'not said'}")
    for key, text in found["metadata"].items():
        shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        typer.echo(f"  {key}: {shown if len(shown) < SHOWN else shown[:SHOWN] + ' … (--json shows all)'}")
