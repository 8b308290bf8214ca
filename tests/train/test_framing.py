"""A model with micro-conditioning gets the framing of exactly the pixels that its latents were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.data.batching.render import framing_for_sample, render_sample
from supertuner.data.ordering.micro_batches import micro_batches
from supertuner.step.batch import StepBatch
from supertuner.train.run.training_run import TrainingRun
from supertuner.train.setup import open_run
from tests.train.runs import config

WAYS: dict[str, dict[str, Any]] = {
    "two variations are kept": {"augmentations_cache_mode": "static", "variations": 2},
    "anew for each epoch": {"augmentations_cache_mode": "refresh_each_epoch"},
    "encoded when used": {"augmentations_cache_mode": "disable_cache"},
}
TURNS = 4


@pytest.mark.parametrize("way", WAYS)
def test_latents_and_framing_belong_to_the_same_cycle(tmp_path: Path, way: str) -> None:
    file = config(tmp_path, "a", model={"family": "sdxl", "switch_boundary_every": 1})
    settings = load_config(file).config
    dataset = settings.datasets[0].model_validate(
        settings.datasets[0].model_dump() | WAYS[way] | {"crop": "random", "resolution": 16, "max_aspect_ratio": 1.0}
    )
    settings = settings.model_copy(update={"datasets": (_wide(dataset, tmp_path),)})
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    with open_run(settings, RunContext.silent(folder)) as run:
        order = run.collator.corpus.order
        for micro in micro_batches(order, range(order.epoch_begin(TURNS)), 2):
            check(run, run.collator.collate(micro, run.model.experts[0]), micro)


def check(run: TrainingRun, batch: StepBatch, micro: Any) -> None:
    """One of the possible cycles gives these latents, and this framing belongs to that cycle."""
    corpus, encoder = run.collator.corpus, run.family.build_media_encoder(run.model, run.device)
    for at, sample in enumerate(micro.draws.sample.tolist()):
        row = torch.empty(micro.bucket.shape, dtype=torch.uint8)
        found = []
        for turn in range(TURNS):
            render_sample(corpus.seed, corpus.datasets[0], sample, turn, micro.bucket, row)
            if torch.equal(encoder.encode(row[None])["latents"][0], batch.latents[at]):
                found.append(framing_for_sample(corpus.seed, corpus.datasets[0], sample, turn, micro.bucket))
        assert found and tuple(batch.conditions["framing"][at].tolist()) in {tuple(map(float, one)) for one in found}


def _wide(dataset: Any, folder: Path) -> Any:
    """The same dataset with images three times as wide as high, so that much is cropped."""
    from PIL import Image

    made = folder / "wide"
    made.mkdir()
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (16, 48, 3), dtype=torch.uint8, generator=generator).numpy()
        Image.fromarray(pixels).save(made / f"{number}.png")
        (made / f"{number}.txt").write_text("a square")
    return dataset.model_copy(update={"instance_data_dir": made})
