"""ImageFraming matches the rendered pixels; the pixels of the test images encode their original coordinates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import AugmentSettings, DatasetSettings
from supertuner.data.batching.render import framing_for_sample, render_sample
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.staging.stager import DatasetStager

SIZES = ((200, 80), (80, 200), (128, 128), (40, 90))
"""Width and height. The pixel in column x and row y is (x, y, 0)."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("framed")
    for number, (width, height) in enumerate(SIZES):
        column, row = np.meshgrid(np.arange(width), np.arange(height))
        image = np.stack([column, row, np.zeros_like(row)], axis=-1).astype(np.uint8)
        Image.fromarray(image).save(folder / f"{number}.png")
    settings = DatasetSettings(
        id="a",
        instance_data_dir=folder,
        resolution=64,
        bucket_step=64,
        max_aspect_ratio=1.0,
        crop="random",
        resize_filter="bilinear",
        augment=AugmentSettings(flip=0.5),
    )
    home = tmp_path_factory.mktemp("arenas")
    stager = DatasetStager(ArenaHome(home), RunContext.silent(home))
    return build_corpus([(settings, stager.open(settings)[1])], seed=5, batch_size=1)


@pytest.mark.parametrize("cycle", range(6))
@pytest.mark.parametrize("sample", range(len(SIZES)))
def test_the_crop_offset_is_the_origin_of_the_first_pixel(corpus: Corpus, sample: int, cycle: int) -> None:
    (dataset,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    width, height = SIZES[sample]
    row = torch.empty(bucket.shape, dtype=torch.uint8)
    render_sample(corpus.seed, dataset, sample, cycle, bucket, row)
    framing = framing_for_sample(corpus.seed, dataset, sample, cycle, bucket)
    assert (framing.original_width, framing.original_height) == (width, height)
    assert (framing.target_width, framing.target_height) == (bucket.width, bucket.height) == (64, 64)
    scale = min(width, height) / 64
    columns, rows = row[0].float().mean(0), row[1].float().mean(1)
    flipped = bool(columns[0] > columns[-1])
    left = width - 1 - columns[0] if flipped else columns[0]
    assert abs(framing.crop_left - left / scale) <= 1.5
    assert abs(framing.crop_top - rows[0] / scale) <= 1.5


def test_the_cycles_of_this_test_have_different_crops(corpus: Corpus) -> None:
    (dataset,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    lefts = {framing_for_sample(corpus.seed, dataset, 0, cycle, bucket).crop_left for cycle in range(6)}
    tops = {framing_for_sample(corpus.seed, dataset, 1, cycle, bucket).crop_top for cycle in range(6)}
    assert len(lefts) > 3 and len(tops) > 3
