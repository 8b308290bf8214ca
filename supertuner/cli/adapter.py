"""`supertuner adapter`: inspect adapter files, write them for other programs, push them, and merge them into models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Inspect, convert, export, push and merge adapter files.", no_args_is_help=True)

MAX_METADATA_CHARACTERS = 2000
"""Longest metadata text that is printed: kohya's trainers store whole lists of tags."""
AdapterFileArgument = Annotated[Path, typer.Argument(help="The .safetensors file of an adapter.", metavar="FILE")]
FamilyOption = Annotated[
    str | None, typer.Option("--family", help="The model family, if the names of the layers fit several.")
]
ExpertOption = Annotated[
    str | None, typer.Option("--expert", help="The expert, if neither the keys nor the file name show it.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Where to write. Default: beside FILE.", metavar="PATH")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
PartialOption = Annotated[bool, typer.Option("--partial", help="Leave out unknown keys.")]


@app.command()
def inspect(
    file: AdapterFileArgument,
    family: FamilyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all metadata.")] = False,
) -> None:
    """Print the naming scheme, experts, ranks, norms and origin of an adapter. Exits with 1 if a value is not
    finite."""
    from supertuner.api import adapters

    report: dict[str, Any] = adapters.inspect(file, family=family).to_dict()
    if as_json:
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print_report(report)
    if report["not_finite"]:
        typer.echo(f"of {report['keys']} tensors, these are not finite: {report['not_finite']}", err=True)
        raise typer.Exit(1)


@app.command()
def convert(
    file: AdapterFileArgument,
    to: Annotated[str, typer.Option("--to", help="A naming scheme; `supertuner adapter schemes` lists them.")],
    out: OutOption = None,
    expert: ExpertOption = None,
    family: FamilyOption = None,
    partial: PartialOption = False,
    force: ForceOption = False,
) -> None:
    """Write an adapter with the key names of another program."""
    from supertuner.api import adapters

    done = adapters.convert(file, to, out, family=family, expert=expert, partial=partial, overwrite=force)
    typer.echo(f"{done.path}: {done.tensors} tensors, {done.from_scheme} to {done.to_scheme}; {done.summary}")


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder (its newest step), RUN@STEP, the folder of a checkpoint, or a .safetensors file.",
            metavar="RUN|RUN@STEP|CHECKPOINT|FILE",
        ),
    ],
    program: Annotated[str, typer.Option("--for", help="diffusers, comfyui or kohya.", metavar="PROGRAM")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File or folder. Default: beside FILE, or exports/PROGRAM of RUN.", metavar="PATH"),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="The base model's pipeline; only for a DoRA FILE for ComfyUI.", metavar="FOLDER"),
    ] = None,
    family: FamilyOption = None,
    partial: PartialOption = False,
    force: ForceOption = False,
) -> None:
    """Write an adapter for a program: one file per expert, with the key names that the program reads. Of a run,
    everything needed is known."""
    from supertuner.api import adapters

    exported = adapters.export(source, program, out, base=base, family=family, partial=partial, overwrite=force)
    for done in exported:
        typer.echo(f"{done.path}: {done.tensors} tensors for {program}; {done.summary}")
    typer.echo(adapters.loading_hint(exported, program))


@app.command()
def push(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder (its newest step), RUN@STEP, the folder of a checkpoint, or a .safetensors file.",
            metavar="RUN|RUN@STEP|CHECKPOINT|FILE",
        ),
    ],
    repository: Annotated[
        str, typer.Argument(help="Repository on the Hugging Face hub; created if missing.", metavar="OWNER/NAME")
    ],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Of a new repository. Default: exports.hub_private, else private."),
    ] = None,
    programs: Annotated[
        list[str] | None,
        typer.Option("--for", help="Also push files for comfyui or kohya. Repeatable.", metavar="PROGRAM"),
    ] = None,
    license: Annotated[
        str | None, typer.Option("--license", help='In the card, such as "apache-2.0". Default: exports.license.')
    ] = None,
    trigger_word: Annotated[
        str | None, typer.Option("--trigger-word", help="In the card. Default: that of the run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a foreign or edited model card.")] = False,
) -> None:
    """Push an adapter, samples of its step and a model card to the Hugging Face hub, as one commit. Needs a token:
    `hf auth login`, or HF_TOKEN."""
    from supertuner.api import adapters

    pushed = adapters.push(
        source,
        repository,
        programs=programs or (),
        private=private,
        license=license,
        trigger_word=trigger_word,
        overwrite=force,
    )
    typer.echo(adapters.push_summary(pushed))
    for file in pushed.files:
        typer.echo(f"  {file}")
    if pushed.kept_card is not None:
        typer.echo("--force replaces the model card")
    if private is not None and private != pushed.is_private:
        typer.echo("the repository existed, and its visibility is unchanged; its settings on the hub change it")


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="One file, or one per expert.", metavar="FILE...")],
    base: Annotated[Path, typer.Option("--base", help="The folder of a diffusers pipeline.", metavar="FOLDER")],
    out: Annotated[Path, typer.Option("--out", help="The new folder.", metavar="FOLDER")],
    strength: Annotated[float, typer.Option("--strength", help="Factor of the adapter; 1 is as trained.")] = 1.0,
    expert: ExpertOption = None,
    family: FamilyOption = None,
) -> None:
    """Write a copy of a model with adapters merged into its weights. The base is not changed."""
    from supertuner.api import adapters

    merged = adapters.merge(files, base, out, strength=strength, family=family, expert=expert)
    for part, count in merged.changed_layers.items():
        change_text = f"{count} layers changed" if count else "unchanged: no FILE belongs to this expert"
        typer.echo(f"{out / part}: {change_text}")


@app.command()
def schemes() -> None:
    """List the naming schemes, each with an example key."""
    from supertuner.api import adapters

    for name, example in adapters.schemes().items():
        typer.echo(f"{name:34} {example}")


def _print_report(report: dict[str, Any]) -> None:
    from supertuner.core.types import bytes_text

    counts = (report[name].items() for name in ("kinds", "ranks", "scales"))
    kinds, ranks, scales = (", ".join(f"{label} ({n})" for label, n in items) for items in counts)
    typer.echo(f"{report['file']}: {bytes_text(report['nbytes'])}, {', '.join(report['dtypes'])}")
    typer.echo(f"  scheme    {report['scheme']}; family {' or '.join(report['families'])}")
    typer.echo(f"  expert    {' and '.join(report['experts']) or 'unknown'}")
    typer.echo(f"  layers    {kinds}; rank {ranks or 'none'}; scale {scales or 'none'}")
    if report["norm"] is not None:
        largest = ", ".join(f"{layer} {norm:.3g}" for layer, norm in report["largest"].items())
        typer.echo(f"  norm      {report['norm']:.4g} in total; largest: {largest}")
    loads = any(report["comfyui"].values())
    comfyui = "reads these names" if loads else "does not read these names; see `supertuner adapter export`"
    typer.echo(f"  ComfyUI   {comfyui}")
    typer.echo(f"  keys      {report['matched']} of {report['keys']} matched")
    for key, reason in report["unknown"].items():
        typer.echo(f"            {key}: {reason}")
    typer.echo(f"  base      {report['base_model'] or 'unknown'}")
    for key, text in report["metadata"].items():
        shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        if len(shown) >= MAX_METADATA_CHARACTERS:
            shown = f"{shown[:MAX_METADATA_CHARACTERS]} … (--json shows all)"
        typer.echo(f"  {key}: {shown}")
