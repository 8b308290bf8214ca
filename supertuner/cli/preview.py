"""`supertuner preview` and `sample-data`: see what the model will see, and something to see it with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.stage import ConfigArgument, SetOption


def register(app: typer.Typer) -> None:
    app.command("preview")(preview)
    app.command("sample-data")(sample_data)


def preview(
    config: ConfigArgument,
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("preview.png"),
    epoch: Annotated[
        int, typer.Option(min=0, max=1_000_000_000, help="The epoch to look at; each is shuffled and changed anew.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many samples of each dataset, for a first try.")
    ] = None,
    sets: SetOption = None,
) -> None:
    """Stage CONFIG's datasets and draw one decoded, augmented batch of every bucket as a contact sheet."""
    from supertuner.tools.preview import preview_dataset as draw
    from supertuner.tools.session import load_command_config

    bucket_count = draw(load_command_config(config, sets or (), limit=limit), out, epoch=epoch)
    empty = "" if bucket_count else f"; no sample is drawn in epoch {epoch}: weights below 1 leave some to later epochs"
    typer.echo(f"{out}: {bucket_count} bucket{'s' if bucket_count != 1 else ''}{empty}")


def sample_data(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    images: Annotated[int, typer.Option(min=0, help="Pictures to draw.")] = 30,
    videos: Annotated[int, typer.Option(min=0, help="Clips to draw.")] = 6,
    sounds: Annotated[int, typer.Option(min=0, help="Tones to play.")] = 6,
    seed: Annotated[int, typer.Option(help="Another seed, other shapes.")] = 0,
) -> None:
    """Write a small captioned dataset of shapes, clips and tones, and a configuration that uses it."""
    from supertuner.tools.sample_data import make_sample_data

    dataset = make_sample_data(folder, images=images, videos=videos, sounds=sounds, seed=seed)
    typer.echo(f"{dataset.config}: {dataset.images} images, {dataset.videos} videos, {dataset.sounds} sounds")
