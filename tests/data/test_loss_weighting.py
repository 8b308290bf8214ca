"""Loss masks and sample weights from real folders: masks are cropped like their samples, and unusable files refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import AugmentSettings, DatasetSettings
from supertuner.core.errors import BrokenMediaError, SourceError
from supertuner.core.events import Event, NullSink, WarningEvent
from supertuner.data.batching.loss_weighting import LossMasks, find_loss_masks, load_sample_weights
from supertuner.data.batching.render import render_sample
from supertuner.data.corpus import Corpus, CorpusDataset, build_corpus
from supertuner.data.staging.stager import DatasetStager

SIZES = ((96, 48), (48, 96), (64, 64))


class EventRecorder(NullSink):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def grey(path: Path, size: tuple[int, int], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0]), np.uint8)
    Image.fromarray(noise).convert("RGB").save(path)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number, size in enumerate(SIZES):
        grey(folder / "in" / f"{number}.png", size, number)
    return folder


def corpus_with(images: Path, arenas: Path, **changed: object) -> Corpus:
    settings = DatasetSettings.model_validate(
        {
            "id": "a",
            "instance_data_dir": images,
            "resolution": (32,),
            "bucket_step": 32,
            "max_aspect_ratio": 1.0,
            "crop": "random",
            "resize_filter": "area",
            "augment": AugmentSettings(flip=0.5),
            **changed,
        }
    )
    stager = DatasetStager(ArenaHome(arenas / "arenas"), RunContext.silent(arenas))
    return build_corpus([(settings, stager.open(settings)[1])], seed=5, batch_size=1)


def find_masks(dataset: CorpusDataset, sink: EventRecorder | None = None) -> LossMasks:
    masks = find_loss_masks(dataset, sink or EventRecorder())
    assert masks is not None
    return masks


@pytest.mark.parametrize("cycle", range(4))
@pytest.mark.parametrize("sample", range(len(SIZES)))
def test_a_mask_is_cropped_and_flipped_like_its_sample(images: Path, tmp_path: Path, sample: int, cycle: int) -> None:
    """Each image is its own mask, so the rendered grey values must equal the weights."""
    corpus = corpus_with(images, tmp_path, mask_dir=images)
    (dataset,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    row = torch.empty(bucket.shape, dtype=torch.uint8)
    render_sample(corpus.seed, dataset, sample, cycle, bucket, row)
    weights = find_masks(dataset).load_mask(corpus.seed, dataset, sample, cycle, bucket)
    torch.testing.assert_close(weights, row[0] / 255, atol=1e-6, rtol=0)


def test_black_pixels_count_mask_floor_and_a_sample_without_a_mask_counts_fully(images: Path, tmp_path: Path) -> None:
    masks, sink = tmp_path / "masks", EventRecorder()
    (masks / "in").mkdir(parents=True)
    Image.new("L", (24, 12), 0).save(masks / "in" / "0.webp", lossless=True)
    corpus = corpus_with(images, tmp_path, mask_dir=masks, mask_floor=0.25)
    (dataset,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    weights = [find_masks(dataset, sink).load_mask(5, dataset, sample, 0, bucket) for sample in range(2)]
    assert weights[0].unique().tolist() == [0.25] and weights[1].unique().tolist() == [1.0]
    event = sink.events[0]
    assert isinstance(event, WarningEvent) and "2 of 3 samples have no mask" in event.message
    assert "in/1" in event.message


def test_a_folder_without_a_fitting_mask_is_refused(images: Path, tmp_path: Path) -> None:
    grey(tmp_path / "masks" / "0.png", (8, 8), 1)
    (dataset,) = corpus_with(images, tmp_path, mask_dir=tmp_path / "masks").datasets
    with pytest.raises(SourceError, match=r"none of the 1 images .* has the name of a sample, such as 'in/0'"):
        find_loss_masks(dataset, EventRecorder())


def test_a_missing_folder_of_masks_is_refused(images: Path, tmp_path: Path) -> None:
    (dataset,) = corpus_with(images, tmp_path, mask_dir=tmp_path / "nowhere").datasets
    with pytest.raises(SourceError, match="nowhere is not a folder"):
        find_loss_masks(dataset, EventRecorder())


BROKEN = {
    r"in/0\.png: is 48 × 48, its sample is 96 × 48": lambda file: grey(file, (48, 48), 1),
    r"in/0\.png: wrong type": lambda file: file.write_bytes(b"not an image"),
    r"in/0\.png: truncated": lambda file: file.write_bytes(file.read_bytes()[:-20]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_mask_or_one_of_another_shape_is_refused_before_the_run(
    images: Path, tmp_path: Path, message: str
) -> None:
    grey(tmp_path / "masks" / "in" / "0.png", (96, 48), 1)
    (dataset,) = corpus_with(images, tmp_path, mask_dir=tmp_path / "masks").datasets
    BROKEN[message](tmp_path / "masks" / "in" / "0.png")
    with pytest.raises(SourceError, match=rf"datasets\[a\]\.mask_dir: .*{message}.*; repair it, or remove it"):
        find_loss_masks(dataset, EventRecorder())


def test_a_mask_that_breaks_during_the_run_is_named(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "masks" / "in" / "0.png"
    grey(file, (96, 48), 1)
    corpus = corpus_with(images, tmp_path, mask_dir=tmp_path / "masks")
    (dataset,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    masks = find_masks(dataset)
    grey(file, (48, 48), 1)
    with pytest.raises(BrokenMediaError, match=r"in/0\.png: is 48 × 48, its sample is 96 × 48"):
        masks.load_mask(5, dataset, 0, 0, bucket)
    file.write_bytes(b"not an image")
    with pytest.raises(BrokenMediaError, match=r"in/0\.png"):
        masks.load_mask(5, dataset, 0, 0, bucket)


def test_masks_without_a_sample_cause_a_warning(images: Path, tmp_path: Path) -> None:
    sink = EventRecorder()
    grey(tmp_path / "masks" / "in" / "0.png", (96, 48), 1)
    grey(tmp_path / "masks" / "in" / "typo.png", (96, 48), 1)
    (dataset,) = corpus_with(images, tmp_path, mask_dir=tmp_path / "masks").datasets
    find_masks(dataset, sink)
    messages = [event.message for event in sink.events if isinstance(event, WarningEvent)]
    assert any("1 of 2 masks have no sample and are not used" in text and "in/typo" in text for text in messages)


def test_weights_of_the_file_are_multiplied_by_the_dataset_s_weight(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.csv"
    file.write_text("file_name,weight\nin/0.png,0.5\nin/2.png,3\nin/9.png,7\n")
    (dataset,) = corpus_with(images, tmp_path, loss_weights_file=file, loss_weight=2.0).datasets
    weights = load_sample_weights(dataset)
    assert weights is not None and weights.tolist() == [1.0, 2.0, 6.0]


def test_without_weight_settings_there_are_no_weights(images: Path, tmp_path: Path) -> None:
    assert load_sample_weights(corpus_with(images, tmp_path).datasets[0]) is None
    halved = load_sample_weights(corpus_with(images, tmp_path, loss_weight=0.5).datasets[0])
    assert halved is not None and halved.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "file_name,weight\nin/0.png,-1\n",
            "the weight of 'in/0.png' is '-1'; it must be one number from 0 to 1,000,000",
        ),
        ("file_name,weight\nin/0.png,1e300\n", "the weight of 'in/0.png' is '1e300'"),
        ("file_name,weight\nin/0.png,much\n", "the weight of 'in/0.png' is 'much'"),
        ("file_name,weight\nin/0.png,1\nin/0.png,2\n", "the weight of 'in/0.png' is '1', '2'"),
        ("file_name,weight\nin/7.png,1\n", "no row of .* names a sample, such as 'in/0'"),
        (
            "file_name,text\nin/0.png,1\n",
            "it has 'file_name', 'text'; it must be .* with the columns 'file_name' and 'weight'$",
        ),
    ],
)
def test_invalid_weights_are_refused(images: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "weights.csv"
    file.write_text(text)
    (dataset,) = corpus_with(images, tmp_path, loss_weights_file=file).datasets
    with pytest.raises(SourceError, match=rf"datasets\[a\]\.loss_weights_file: .*{message}"):
        load_sample_weights(dataset)
