"""How a run is set up: what cannot work is refused before encoding, and cache entries depend on their encoder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import load_config
from supertuner.core.errors import ModelError, TrainError
from supertuner.core.events import Event, WarningEvent
from supertuner.data.corpus_loader import open_corpus
from supertuner.models.families.tiny_pipelines import build_pipeline
from supertuner.models.families.wan22.family import tiny_wan_pipeline
from supertuner.models.family_loader import load_family
from supertuner.models.fingerprint import fingerprint
from supertuner.models.spec import ModelDescription, ModelSource
from supertuner.step.precision import ComputePrecision
from supertuner.train.run.model_source import open_model
from supertuner.train.run_checks import require_expert_settings
from supertuner.train.setup import build_encoding_spec
from supertuner.train.validation.validate import _captioned_samples
from tests.models.families.pipelines import tiny_wan, tiny_wan_image_to_video
from tests.train.runs import TrainingForkServer, config

__all__ = ["tiny_wan", "tiny_wan_image_to_video"]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a sample too narrow for a patch": ({"validation": {"width": 50, "height": 32}}, "multiples of 16"),
    "a sample of three frames": ({"validation": {"frames": 3}}, "3 frames"),
    "a picture with frames": ({"model": {"family": "flux"}, "validation": {"frames": 5}}, "takes RGB images"),
    "an adapter on a layer that is not there": (
        {"adapter": {"targets": ["to_x"]}},
        "no module of high_noise has the name",
    ),
    "rates that start above their limit": (
        {"optimizer": {"name": "automagic", "learning_rate": 0.1}},
        "learning rates start, is not between min_lr",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_the_model_cannot_do_are_refused_before_encoding(
    parent: TrainingForkServer, tmp_path: Path, what: str
) -> None:
    changed, why = REFUSED[what]
    assert parent.train(config(tmp_path, "a", **changed)) == 1
    assert why in parent.output()
    assert not (tmp_path / "cache-a").exists() and not (tmp_path / "a" / "run" / "losses.jsonl").exists()


def test_image_to_video_and_text_to_video_of_one_vae_have_separate_cache_entries(
    tiny_wan: ModelSource, tiny_wan_image_to_video: ModelSource, tmp_path: Path
) -> None:
    wan, settings = load_family("wan2.2"), RunConfig.model_validate({"run": {"output_dir": tmp_path}})
    models = [wan.read_model(source) for source in (tiny_wan, tiny_wan_image_to_video)]
    assert len({fingerprint(wan.media_files(model), None) for model in models}) == 1, "the VAE is the same"
    precision = ComputePrecision("fp32", torch.device("cpu"))
    made = [build_encoding_spec(settings, wan, model, precision, str).fingerprints for model in models]
    assert made[0].media != made[1].media and made[0].text == made[1].text


class RecordingSink:
    """A sink that records events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event, /) -> None:
        self.events.append(event)


def model_of_nothing() -> ModelDescription:
    return ModelDescription(ModelSource("nowhere"), "", (), frozenset(), 1.0, {})


def test_equal_captions_are_decoded_once_for_validation_prompts(tmp_path: Path) -> None:
    """Each sample decodes a whole clip if the model starts from a frame."""
    settings = load_config(config(tmp_path, "a")).config
    same = settings.datasets[0].model_copy(
        update={"captions": settings.datasets[0].captions.model_copy(update={"constant": "x"})}
    )
    part = settings.model_copy(update={"datasets": (same,)})
    with open_corpus(part, RunContext.silent(part.run.output_dir)) as corpus:
        (only,) = _captioned_samples(corpus, replace(model_of_nothing(), needs_first_frame=True))
    assert only.caption == "x" and only.image is not None and only.image.shape == (32, 32, 3)


def test_a_resumed_run_uses_its_first_hub_commit_unless_a_revision_is_set(tmp_path: Path) -> None:
    """A branch on the hub may have moved: the adapter would continue on weights that it was not trained on."""
    named = {"family": "wan2.2", "path": "nobody/has-this", "offline": True}
    for given, wanted in (({}, "revision abc"), ({"revision": "v2"}, "revision v2")):
        settings = RunConfig.model_validate({"model": {**named, **given}})
        with pytest.raises(ModelError, match=wanted):
            open_model(settings, tmp_path, "abc")


def test_settings_of_an_expert_that_the_model_lacks_are_refused_or_warned_of(tmp_path: Path) -> None:
    """A family with two experts also has smaller models with one."""
    build_pipeline(partial(tiny_wan_pipeline, kind="ti2v"), 0).save_pretrained(tmp_path / "5b")
    model = load_family("wan2.2").read_model(ModelSource(str(tmp_path / "5b")))
    named = {"family": "wan2.2", "path": str(tmp_path / "5b")}
    sink = RecordingSink()
    both = RunConfig.model_validate({"model": named, "adapter": {"low_noise": {"rank": 2}}})
    with pytest.raises(TrainError, match=r"adapter\.low_noise is set, and .* has model; put it into adapter itself"):
        require_expert_settings(both, model, sink)
    rates = {"name": "automagic", "high_noise_lr_bump": 1e-6, "low_noise_max_lr": 1e-3}
    require_expert_settings(RunConfig.model_validate({"model": named, "optimizer": rates}), model, sink)
    assert {event.what for event in sink.events if isinstance(event, WarningEvent)} == {
        "optimizer.high_noise_lr_bump",
        "optimizer.low_noise_max_lr",
    }
    require_expert_settings(RunConfig.model_validate({"model": named, "adapter": {"rank": 2}}), model, sink)
    assert len(sink.events) == 2, "what is events for all experts is events for this one"
