"""`supertuner stage`, `preview` and `sample-data`: stage datasets, draw what the model receives, write sample data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.options import ConfigArgument, JsonOption, SampleLimitOption, SetOption


def stage(
    config: ConfigArgument,
    sets: SetOption = None,
    limit: SampleLimitOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on broken files, and list all of them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stage every dataset of CONFIG into memory that all processes of this node share. Staged data are reused."""
    from supertuner.api.session import load_command_config, open_session
    from supertuner.tools.staging import stage_all_datasets, stage_summary

    with open_session(load_command_config(config, sets or (), limit=limit, strict=strict)) as session:
        results = stage_all_datasets(session)
    if as_json:
        typer.echo(json.dumps([result.figures() for result in results], indent=2))
        return
    for result in results:
        typer.echo(stage_summary(result))
    typer.echo(f"run folder: {session.run_dir}")


def preview(
    config: ConfigArgument,
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path("preview.png"),
    epoch: Annotated[
        int,
        typer.Option(min=0, max=1_000_000_000, help="The epoch to draw; each has its own order and augmentations."),
    ] = 0,
    limit: SampleLimitOption = None,
    sets: SetOption = None,
) -> None:
    """Stage CONFIG's datasets and draw one decoded, augmented batch of every bucket as a contact sheet."""
    from supertuner.api.session import load_command_config
    from supertuner.tools.preview import preview_dataset

    bucket_count = preview_dataset(load_command_config(config, sets or (), limit=limit), out, epoch=epoch)
    empty = "" if bucket_count else f"; epoch {epoch} has no samples: weights below 1 leave some to later epochs"
    typer.echo(f"{out}: {bucket_count} bucket{'s' if bucket_count != 1 else ''}{empty}")


def sample_data(
    folder: Annotated[Path, typer.Argument(help="The folder to write to; created if missing.")],
    images: Annotated[int, typer.Option(min=0, help="Number of images.")] = 30,
    videos: Annotated[int, typer.Option(min=0, help="Number of video clips.")] = 6,
    sounds: Annotated[int, typer.Option(min=0, help="Number of sounds.")] = 6,
    seed: Annotated[int, typer.Option(help="Random seed of the shapes.")] = 0,
) -> None:
    """Write a small captioned dataset of shapes, clips and tones, and a configuration that uses it."""
    from supertuner.tools.sample_data import make_sample_data

    dataset = make_sample_data(folder, images=images, videos=videos, sounds=sounds, seed=seed)
    typer.echo(f"{dataset.config}: {dataset.images} images, {dataset.videos} videos, {dataset.sounds} sounds")
