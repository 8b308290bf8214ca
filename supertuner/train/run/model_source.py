"""Opens the model that a configuration names: its family, and where its parts are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from supertuner.config.settings.model import single_file_setting
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.durable import sync_folder
from supertuner.core.errors import ModelError
from supertuner.core.interrupts import raise_lost_interrupt
from supertuner.models.family_loader import load_family as family_of
from supertuner.models.spec import Family, ModelDescription, ModelSource

TINY_MODEL = "tiny"


def open_model(config: RunConfig, folder: Path, pinned_revision: str | None = None) -> tuple[Family, ModelDescription]:
    """The model as its config files describe it; ModelError if there is none.

    `pinned_revision` is the hub commit that the run began with: a resumed run uses it, even if the branch has moved.
    """
    settings = config.model
    family = family_of(settings.family)
    if settings.path is None:
        raise ModelError('model.path is not set; name a folder, a model on the hub, or "tiny"')
    path = str(_tiny_model_path(family, folder)) if settings.path == TINY_MODEL else settings.path
    model = family.read_model(
        ModelSource(path, settings.revision or pinned_revision, settings.variant, settings.offline)
    )
    return family, _with_single_files(config, family, model)


def _with_single_files(config: RunConfig, family: Family, model: ModelDescription) -> ModelDescription:
    first, *later = model.experts
    component_by_setting = {
        "single_file": first.component,
        **{single_file_setting(expert.name): expert.component for expert in later},
    }
    file_by_part = {}
    for setting, file in config.model.single_files.items():
        if setting not in component_by_setting:
            experts = " and ".join(expert.name for expert in model.experts)
            raise ModelError(f"model.{setting} is set, and {model.title} has {experts}; set model.single_file instead")
        file_by_part[component_by_setting[setting]] = file
    if not file_by_part:
        return model
    source = model.source
    return family.read_model(ModelSource(source.path, source.revision, source.variant, source.offline, file_by_part))


def tiny_model_folder(family_name: str, run_dir: Path) -> Path:
    """Where the tiny model of a family is, or will be, in a run's folder."""
    return run_dir / f"{TINY_MODEL}-{family_name}"


def _tiny_model_path(family: Family, folder: Path) -> Path:
    """The family's tiny model in the run's folder; written now, completely or not at all, if it is missing."""
    target = tiny_model_folder(family.name, folder)
    temporary = folder / f".making-{target.name}"
    if not target.exists():
        if temporary.exists():
            shutil.rmtree(temporary)
        try:
            family.write_tiny_pipeline(temporary, 0)
        except SafetensorError as error:  # raised when the disk is full
            raise ModelError(f"{target} cannot be written: {error}; free some space") from error
        raise_lost_interrupt()  # it may have left a file incomplete
        os.rename(temporary, target)
        sync_folder(folder)
    return target
