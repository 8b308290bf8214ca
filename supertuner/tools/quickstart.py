"""The first minute with SuperTuner: a small captioned dataset of every kind, staged, and drawn as its batches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from supertuner.core.errors import SuperTunerError
from supertuner.core.events import Silence
from supertuner.data.opened import open_corpus
from supertuner.data.staging.result import StageResult
from supertuner.tools.preview import write_preview
from supertuner.tools.sample_data import make_sample_data
from supertuner.tools.session import life_of, load_narrowed, session
from supertuner.tools.staging import stage_all

SHEET = "contact_sheet.png"
DATA = "data"


@dataclass(frozen=True, slots=True)
class Quickstart:
    """What was made, and where it is."""

    config: Path
    run: Path
    sheet: Path
    buckets: int
    staged: tuple[StageResult, ...]


def quickstart(folder: Path) -> Quickstart:
    """Make the dataset below `folder` unless it is there from last time, stage it, draw one batch of every bucket."""
    config = _dataset(folder)
    with session(load_narrowed(config, [f"run.output_dir={folder / 'runs'}"])) as work:
        staged = stage_all(work)
        quiet = Silence()  # all that there is to tell was told just now
        with open_corpus(work.config, host=work.host, sink=quiet, progress=quiet, life=life_of(work.config)) as corpus:
            buckets = write_preview(corpus, folder / SHEET, threads=work.host.cpus())
        return Quickstart(config, work.folder.path, folder / SHEET, buckets, tuple(staged))


def _dataset(folder: Path) -> Path:
    data = folder / DATA
    config = data / "config.json"
    if config.is_file():
        return config
    if data.exists() and any(data.iterdir()):
        raise SuperTunerError(f"{data} holds files of yours; give another folder with --dir, or move them away")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".making-", dir=folder) as making:  # whole or not there, if this is interrupted
        os.replace(make_sample_data(Path(making) / DATA).config.parent, data)
    return config
