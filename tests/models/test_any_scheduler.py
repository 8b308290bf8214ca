"""A model with any scheduler of diffusers is weighted by its table, or raises an error with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch

from supertuner.config.settings.model import ObjectiveSettings
from supertuner.core.errors import ModelError
from supertuner.models.families.sdxl.family import tiny_sdxl_pipeline
from supertuner.models.families.tiny_pipelines import write_pipeline
from supertuner.models.family_loader import load_family
from supertuner.models.objective.from_settings import objective_from_settings
from supertuner.models.objective.loss_weighting import loss_weight
from supertuner.models.spec import ModelSource

SCHEDULERS = sorted(name for name in dir(diffusers) if name.endswith("Scheduler") and not name.startswith("Flax"))
TRAINED = {"DDPMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler", "LCMScheduler"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipeline_folder = tmp_path_factory.mktemp("sdxl") / "any"
    write_pipeline(tiny_sdxl_pipeline, pipeline_folder, 0)
    return pipeline_folder


def with_scheduler(folder: Path, name: str) -> ModelSource:
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", name]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name}))
    return ModelSource(str(folder))


def test_there_are_schedulers_to_test() -> None:
    assert len(SCHEDULERS) > 40 and set(SCHEDULERS) >= TRAINED


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # some schedulers use deprecated functions of numpy
@pytest.mark.parametrize("weighting", ["min_snr", "debiased"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_gives_weights_or_an_error_with_the_reason(folder: Path, name: str, weighting: str) -> None:
    try:
        model = load_family("sdxl").read_model(with_scheduler(folder, name))
    except ModelError as error:
        assert name in str(error) and name not in TRAINED
        return
    assert model.alphas_cumprod is not None and model.prediction is not None
    settings = ObjectiveSettings.model_validate({"weighting": weighting})
    objective = objective_from_settings(settings, model.prediction, torch.tensor(model.alphas_cumprod))
    found = loss_weight(torch.linspace(0, 1, 33), objective)
    assert found.isfinite().all() and (found > 0).all()
    assert (found.diff() >= 0).all(), "errors in noise count more where there is more noise"
