"""How a run is set up: what cannot work is refused before anything is encoded, and entries are known by their maker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from supertuner.config.tree import RunConfig
from supertuner.models.fingerprint import fingerprint
from supertuner.models.spec import Source
from supertuner.models.table import family
from supertuner.step.precision import Precision
from supertuner.train.setup import encoding_of
from tests.models.pipelines import tiny_wan, tiny_wan_image_to_video
from tests.train.runs import Parent, config

__all__ = ["tiny_wan", "tiny_wan_image_to_video"]

REFUSED = {
    "a sample too narrow for a patch": ({"validation": {"width": 50, "height": 32}}, "multiples of 16"),
    "a sample of three frames": ({"validation": {"frames": 3}}, "3 frames"),
    "a picture with frames": ({"model": {"family": "flux"}, "validation": {"frames": 5}}, "takes pictures"),
    "an optimizer of the future": ({"optimizer": {"name": "automagic"}}, "not part of this version"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_model_cannot_do_is_refused_before_anything_is_encoded(
    parent: Parent, tmp_path: Path, what: str
) -> None:
    changed, why = REFUSED[what]
    assert parent.train(config(tmp_path, "a", **changed)) == 1
    assert why in parent.said()
    assert not (tmp_path / "cache-a").exists() and not (tmp_path / "a" / "run" / "losses.jsonl").exists()


def test_of_one_vae_image_to_video_and_text_to_video_have_entries_of_their_own(
    tiny_wan: Source, tiny_wan_image_to_video: Source, tmp_path: Path
) -> None:
    wan, settings = family("wan2.2"), RunConfig.model_validate({"run": {"output_dir": tmp_path}})
    models = [wan.read(source) for source in (tiny_wan, tiny_wan_image_to_video)]
    assert len({fingerprint(wan.media_files(model), None) for model in models}) == 1, "the VAE is the same"
    precision = Precision("fp32", torch.device("cpu"))
    made = [encoding_of(settings, wan, model, precision).identities for model in models]
    assert made[0].media != made[1].media and made[0].text == made[1].text
