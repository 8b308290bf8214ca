"""Which model a configuration means: its family, and where its parts are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from supertuner.config.settings.tree import RunConfig
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.models.spec import Family, Model, Source
from supertuner.models.table import family as family_of

TINY = "tiny"


def opened_model(config: RunConfig, folder: Path, pinned: str | None = None) -> tuple[Family, Model]:
    """The model that the configuration names, as its config files describe it.

    `pinned` is the commit that a run on the hub's model began with: it goes on with that, whatever the branch is now.
    """
    settings = config.model
    family = family_of(settings.family)
    if settings.path is None:
        raise ModelError('model.path is not set; name a folder, a model on the hub, or "tiny"')
    path = str(_tiny(family, folder)) if settings.path == TINY else settings.path
    model = family.read(Source(path, settings.revision or pinned, settings.variant, settings.offline))
    return family, _with_single_files(config, family, model)


def _with_single_files(config: RunConfig, family: Family, model: Model) -> Model:
    settings = config.model
    files = {"": settings.single_file, "low_noise": settings.single_file_low_noise}
    given = {}
    if files[""] is not None:
        given[model.experts[0].part] = files[""]
    if files["low_noise"] is not None:
        low = next((expert for expert in model.experts if expert.name == "low_noise"), None)
        if low is None:
            raise ModelError(f"model.single_file_low_noise is set, and {model.title} has no low-noise expert")
        given[low.part] = files["low_noise"]
    if not given:
        return model
    source = model.source
    return family.read(Source(source.path, source.revision, source.variant, source.offline, given))


def _tiny(family: Family, folder: Path) -> Path:
    """The family's tiny model in the run's folder, made now if it is not there: whole or not at all."""
    name = f"{TINY}-{family.name}"
    made, making = folder / name, folder / f".making-{name}"
    if not made.exists():
        if making.exists():
            shutil.rmtree(making)
        try:
            family.tiny(making, 0)
        except SafetensorError as error:  # its word for a disk that is full
            raise ModelError(f"{made} cannot be written: {error}; make room") from error
        os.rename(making, made)
        sync_folder(folder)
    return made
