"""`supertuner sample`: pictures or videos from an adapter on its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.options import SetOption


def sample(
    source: Annotated[
        str,
        typer.Argument(
            help="A run folder (its newest step), RUN@STEP, a checkpoint, a .safetensors file, or a folder with one "
            "file per expert.",
            metavar="RUN|RUN@STEP|ADAPTER",
            show_default=False,
        ),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="May be repeated. Default: the prompts of the run's validation.", metavar="TEXT"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="The first random seed. Default: those of the run's validation.", metavar="N"),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Samples per prompt, with seeds from --seed (or 0) on.", metavar="N")
    ] = None,
    strength: Annotated[float, typer.Option(help="Factor of the adapter; 1 is as trained, 0 the base model.")] = 1.0,
    sets: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="The new folder. Default: a new one in the run, or below ./samples.")
    ] = None,
) -> None:
    """Make pictures or videos with an adapter on its base model, and a grid of them. Nothing is overwritten.

    Size, steps and guidance are those of the run's validation. --set changes them, for example
    --set validation.width=512 --set validation.height=512 --set validation.inference_steps=20; --set validation.image
    names the image to start from or edit, --set model.path the base model of a file, --set train.device the device.
    """
    from supertuner.api.sampling import sample as make_samples

    seeds = () if seed is None and count is None else range(seed or 0, (seed or 0) + (count or 1))
    made = make_samples(source, prompts or (), seeds=seeds, strength=strength, overrides=sets or (), out=out)
    for path in sorted(made.folder.iterdir()):
        typer.echo(path)
    typer.echo(f"look at {made.grid}" + ("" if made.video is None else f" and {made.video}"))
