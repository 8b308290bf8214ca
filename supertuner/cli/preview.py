"""`supertuner preview` and `supertuner sample-data`: see what the model will see, and something to see it with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("preview")(preview)
    app.command("sample-data")(sample_data)


def preview(
    config: Annotated[Path, typer.Argument(help="The configuration: JSON, YAML or TOML.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("preview.png"),
    epoch: Annotated[int, typer.Option(min=0, help="The epoch to look at; each is shuffled and changed anew.")] = 0,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, as a.b[0].c=value; may be repeated.")
    ] = None,
) -> None:
    """Stage CONFIG's datasets and draw one decoded, augmented batch of every bucket as a contact sheet."""
    from supertuner.config.load import load
    from supertuner.core.host import Host
    from supertuner.data.opened import open_corpus
    from supertuner.sinks.console import Console
    from supertuner.tools.preview import write_preview

    loaded = load(config, sets=sets or ())
    host = Host()
    # Staged by this command, the data is for a later run: "run" would end it with the command.
    life = "until_removed" if loaded.config.arena.keep == "run" else loaded.config.arena.keep
    with Console() as console:
        for note in loaded.notes:
            console.emit(note)
        with open_corpus(loaded.config, host=host, sink=console, progress=console, life=life) as corpus:
            threads = loaded.config.loader.num_workers or host.cpus()
            shown = write_preview(corpus, out, epoch=epoch, threads=threads)
    typer.echo(f"{out}: {shown} bucket{'s' if shown != 1 else ''}")


def sample_data(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    images: Annotated[int, typer.Option(min=0, help="Pictures to draw.")] = 30,
    videos: Annotated[int, typer.Option(min=0, help="Clips to draw.")] = 6,
    sounds: Annotated[int, typer.Option(min=0, help="Tones to play.")] = 6,
    seed: Annotated[int, typer.Option(help="Another seed, other shapes.")] = 0,
) -> None:
    """Write a small captioned dataset of shapes, clips and tones, and a configuration that uses it."""
    from supertuner.tools.sample_data import make_sample_data

    made = make_sample_data(folder, images=images, videos=videos, sounds=sounds, seed=seed)
    typer.echo(f"{made.config}: {made.images} images, {made.videos} videos, {made.sounds} sounds")
