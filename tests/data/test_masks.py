"""Masks and weights of samples, from real folders: a mask goes where its sample goes, and what fits nothing is told."""

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
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate(SIZES):
        grey(folder / "in" / f"{number}.png", size, number)
    return folder


def corpus_with(pictures: Path, arenas: Path, **changed: object) -> Corpus:
    settings = DatasetSettings.model_validate(
        {
            "id": "a",
            "instance_data_dir": pictures,
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


def find_masks(part: CorpusDataset, sink: EventRecorder | None = None) -> LossMasks:
    masks = find_loss_masks(part, sink or EventRecorder())
    assert masks is not None
    return masks


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("sample", range(len(SIZES)))
def test_a_mask_that_is_the_picture_stays_the_picture(pictures: Path, tmp_path: Path, sample: int, turn: int) -> None:
    """Whatever is cropped and mirrored: the grey of each place is what the place counts."""
    corpus = corpus_with(pictures, tmp_path, mask_dir=pictures)
    (part,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    row = torch.empty(bucket.shape, dtype=torch.uint8)
    render_sample(corpus.seed, part, sample, turn, bucket, row)
    drawn = find_masks(part).load_mask(corpus.seed, part, sample, turn, bucket)
    torch.testing.assert_close(drawn, row[0] / 255, atol=1e-6, rtol=0)


def test_black_places_count_the_floor_and_a_sample_without_a_mask_counts_whole(pictures: Path, tmp_path: Path) -> None:
    masks, heard = tmp_path / "masks", EventRecorder()
    (masks / "in").mkdir(parents=True)
    Image.new("L", (24, 12), 0).save(masks / "in" / "0.webp", lossless=True)
    corpus = corpus_with(pictures, tmp_path, mask_dir=masks, mask_floor=0.25)
    (part,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    drawn = [find_masks(part, heard).load_mask(5, part, sample, 0, bucket) for sample in range(2)]
    assert drawn[0].unique().tolist() == [0.25] and drawn[1].unique().tolist() == [1.0]
    told = heard.events[0]
    assert isinstance(told, WarningEvent) and "2 of 3 samples have no mask" in told.message and "in/1" in told.message


def test_a_folder_in_which_no_mask_fits_is_refused(pictures: Path, tmp_path: Path) -> None:
    grey(tmp_path / "masks" / "0.png", (8, 8), 1)
    (part,) = corpus_with(pictures, tmp_path, mask_dir=tmp_path / "masks").datasets
    with pytest.raises(SourceError, match=r"none of the 1 pictures .* named like a sample, such as 'in/0'"):
        find_loss_masks(part, EventRecorder())


def test_a_folder_of_masks_that_is_not_there_is_refused(pictures: Path, tmp_path: Path) -> None:
    (part,) = corpus_with(pictures, tmp_path, mask_dir=tmp_path / "nowhere").datasets
    with pytest.raises(SourceError, match="nowhere is not a folder"):
        find_loss_masks(part, EventRecorder())


BROKEN = {
    r"in/0\.png: is 48 × 48 and its sample 96 × 48": lambda file: grey(file, (48, 48), 1),
    r"in/0\.png: wrong type": lambda file: file.write_bytes(b"no picture"),
    r"in/0\.png: truncated": lambda file: file.write_bytes(file.read_bytes()[:-20]),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_mask_of_another_shape_or_of_no_picture_is_refused_before_the_run(
    pictures: Path, tmp_path: Path, says: str
) -> None:
    grey(tmp_path / "masks" / "in" / "0.png", (96, 48), 1)
    (part,) = corpus_with(pictures, tmp_path, mask_dir=tmp_path / "masks").datasets
    BROKEN[says](tmp_path / "masks" / "in" / "0.png")
    with pytest.raises(SourceError, match=rf"datasets\[a\]\.mask_dir: .*{says}.*; mend it, or remove it"):
        find_loss_masks(part, EventRecorder())


def test_a_mask_that_breaks_during_the_run_names_its_file(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "masks" / "in" / "0.png"
    grey(file, (96, 48), 1)
    corpus = corpus_with(pictures, tmp_path, mask_dir=tmp_path / "masks")
    (part,), bucket = corpus.datasets, corpus.order.groups[0].bucket
    masks = find_masks(part)
    grey(file, (48, 48), 1)
    with pytest.raises(BrokenMediaError, match=r"in/0\.png: is 48 × 48 and its sample 96 × 48"):
        masks.load_mask(5, part, 0, 0, bucket)
    file.write_bytes(b"no picture")
    with pytest.raises(BrokenMediaError, match=r"in/0\.png"):
        masks.load_mask(5, part, 0, 0, bucket)


def test_masks_without_a_sample_are_told(pictures: Path, tmp_path: Path) -> None:
    heard = EventRecorder()
    grey(tmp_path / "masks" / "in" / "0.png", (96, 48), 1)
    grey(tmp_path / "masks" / "in" / "typo.png", (96, 48), 1)
    (part,) = corpus_with(pictures, tmp_path, mask_dir=tmp_path / "masks").datasets
    find_masks(part, heard)
    told = [event.message for event in heard.events if isinstance(event, WarningEvent)]
    assert any("1 of 2 masks have no sample and are not used" in message and "in/typo" in message for message in told)


def test_samples_count_what_their_file_says_times_what_their_dataset_does(pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.csv"
    file.write_text("file_name,weight\nin/0.png,0.5\nin/2.png,3\nin/9.png,7\n")
    (part,) = corpus_with(pictures, tmp_path, loss_weights_file=file, loss_weight=2.0).datasets
    weights = load_sample_weights(part)
    assert weights is not None and weights.tolist() == [1.0, 2.0, 6.0]


def test_without_anything_said_there_are_no_weights(pictures: Path, tmp_path: Path) -> None:
    assert load_sample_weights(corpus_with(pictures, tmp_path).datasets[0]) is None
    same = load_sample_weights(corpus_with(pictures, tmp_path, loss_weight=0.5).datasets[0])
    assert same is not None and same.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file_name,weight\nin/0.png,-1\n", "the weight of 'in/0.png' is '-1'; it is one number from 0 to 1,000,000"),
        ("file_name,weight\nin/0.png,1e300\n", "the weight of 'in/0.png' is '1e300'"),
        ("file_name,weight\nin/0.png,much\n", "the weight of 'in/0.png' is 'much'"),
        ("file_name,weight\nin/0.png,1\nin/0.png,2\n", "the weight of 'in/0.png' is '1', '2'"),
        ("file_name,weight\nin/7.png,1\n", "no row of .* names a sample, such as 'in/0'"),
        (
            "file_name,text\nin/0.png,1\n",
            "it has 'file_name', 'text'; it is a .* with the columns 'file_name' and 'weight'$",
        ),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(pictures: Path, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "weights.csv"
    file.write_text(text)
    (part,) = corpus_with(pictures, tmp_path, loss_weights_file=file).datasets
    with pytest.raises(SourceError, match=rf"datasets\[a\]\.loss_weights_file: .*{says}"):
        load_sample_weights(part)
