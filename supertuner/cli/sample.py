"""`supertuner sample`: pictures or videos from an adapter on its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
        typer.Option("--prompt", help="May be repeated. Default: validation.prompts of the run.", metavar="TEXT"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The first random seed. Default: the seeds of the run's validation.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Samples per prompt, with consecutive seeds.")] = None,
    strength: Annotated[float, typer.Option(help="Factor of the adapter; 1 is as trained, 0 the base model.")] = 1.0,
    width: Annotated[int | None, typer.Option(min=1, help="In pixels. Default, as below: that of the run.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames per sample; 1 makes pictures.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps per sample.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Scale of classifier-free guidance.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What guidance steers away from.", metavar="TEXT")] = None,
    image: Annotated[
        Path | None, typer.Option(help="The first frame, or the image to edit, for models that need one.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The base model of ADAPTER: a folder or hub name. Default: as in its metadata.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="The model family of ADAPTER, if the names of its layers fit several.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: train.device of the run.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new folder. Default: a new one in the run, or below ./samples.")
    ] = None,
) -> None:
    """Make pictures or videos with an adapter on its base model, and a grid of them. Nothing is overwritten."""
    from supertuner.api.sampling import sample as make_samples

    seeds = None if seed is None and count is None else range(seed or 0, (seed or 0) + (count or 1))
    made = make_samples(
        source,
        prompts or (),
        seeds=seeds,
        strength=strength,
        width=width,
        height=height,
        frames=frames,
        inference_steps=steps,
        guidance_scale=guidance,
        negative_prompt=negative_prompt,
        image=image,
        model=model,
        family=family,
        device=device,
        out=out,
    )
    for path in sorted(made.folder.iterdir()):
        typer.echo(path)
    typer.echo(f"look at {made.grid}" + ("" if made.video is None else f" and {made.video}"))
