"""`data.open`: staged samples as a torch dataset; workers, forked or spawned, read the same values from one arena."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import supertuner as st
from supertuner.core.errors import ConfigError, SourceError

SIZES = ((96, 48), (96, 48), (48, 96), (96, 48), (48, 96))


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Wide and tall pictures, so that there are two buckets."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number, size in enumerate(SIZES):
        picture = Image.new("RGB", size, (40 * number, 10, 250 - 40 * number))
        picture.paste("white", (0, 0, size[0] // 2, size[1]))  # so that a flipped picture is another one
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    common = {"resolution": 64, "bucket_step": 16, "augment": {"flip": 0.5}}
    return {
        "run": {"output_dir": str(tmp_path / "runs"), "seed": 5},
        "arena": {"home": str(tmp_path / "arenas")},
        "datasets": [{"id": "pictures", "instance_data_dir": str(folder), **common}],
        "train": {"batch_size": 2},
    }


@pytest.fixture
def dataset(settings: dict[str, Any]) -> Any:
    with st.data.open(st.load_config(settings)) as opened:
        yield opened


def test_a_sample_has_its_picture_caption_and_name(dataset: st.data.ArenaDataset) -> None:
    assert isinstance(dataset, Dataset) and len(dataset) == len(SIZES)
    for index in range(len(dataset)):
        sample = dataset[index]
        number = sample["key"].partition(".")[0]
        assert sample["caption"] == f"picture {number}" and sample["dataset"] == "pictures"
        assert sample["image"].dtype is torch.uint8 and sample["image"].shape[0] == 3
        wide = SIZES[int(number)][0] > SIZES[int(number)][1]
        assert (sample["image"].shape[2] > sample["image"].shape[1]) is wide
    assert sorted(sample["key"].partition(".")[0] for sample in dataset) == ["0", "1", "2", "3", "4"]


def test_an_index_outside_is_an_index_error(dataset: st.data.ArenaDataset) -> None:
    for index in (-1, len(SIZES)):
        with pytest.raises(IndexError, match="of 5 samples"):
            dataset[index]


def test_batches_have_one_bucket_and_use_every_sample_once(dataset: st.data.ArenaDataset) -> None:
    batches = dataset.batches()
    assert sorted(index for batch in batches for index in batch) == list(range(len(SIZES)))
    for batch in batches:
        collated = dataset.collate([dataset[index] for index in batch])
        assert collated["image"].shape[0] == len(batch) == len(collated["caption"]) <= 2
    assert dataset.batches(0) == batches


def test_samples_of_different_buckets_are_not_stacked(dataset: st.data.ArenaDataset) -> None:
    with pytest.raises(SourceError, match=r"different buckets cannot .* use DataLoader\(batch_sampler="):
        dataset.collate([dataset[0], dataset[len(dataset) - 1]])


def test_the_epoch_selects_the_augmentation(dataset: st.data.ArenaDataset) -> None:
    first = [dataset[index]["image"] for index in range(len(dataset))]
    assert all(torch.equal(image, dataset[index]["image"]) for index, image in enumerate(first))
    flipped = []
    for dataset.epoch in (1, 2, 3):
        flipped += [not torch.equal(image, dataset[index]["image"]) for index, image in enumerate(first)]
    assert True in flipped and False in flipped
    assert pickle.loads(pickle.dumps(dataset)).epoch == 3  # noqa: S301 -- as torch sends it to a spawned worker


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same_values(dataset: st.data.ArenaDataset, method: str) -> None:
    batches = dataset.batches()
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=dataset.collate,
        num_workers=2,
        multiprocessing_context=method,
    )
    for batch, indices in zip(loader, batches, strict=True):
        own = dataset.collate([dataset[index] for index in indices])
        assert torch.equal(batch["image"], own["image"]) and batch["key"] == own["key"]


def test_a_pickled_dataset_holds_names_and_no_pictures(dataset: st.data.ArenaDataset) -> None:
    content = pickle.dumps(dataset)
    assert len(content) < 20_000
    with pickle.loads(content) as attached:  # noqa: S301
        assert torch.equal(attached[2]["image"], dataset[2]["image"])


def test_an_arena_is_enough_if_its_source_is_gone(settings: dict[str, Any]) -> None:
    settings["arena"]["keep"] = "until_removed"
    with st.data.open(st.load_config(settings)) as opened:
        before = opened[0]["image"]
    folder = Path(settings["datasets"][0]["instance_data_dir"])
    folder.rename(folder.with_name("moved"))
    with st.data.open(st.load_config(settings)) as opened:
        assert torch.equal(opened[0]["image"], before)
    settings["datasets"][0]["id"] = "another"
    with pytest.raises(ConfigError, match="is not a folder"):
        st.data.open(st.load_config(settings))


def test_held_out_datasets_are_opened_apart(settings: dict[str, Any]) -> None:
    config = st.load_config(settings)
    with pytest.raises(SourceError, match=r"the settings given: there is no held-out dataset"):
        st.data.open(config, held_out=True)
    settings["datasets"].append({**settings["datasets"][0], "id": "others", "held_out": True, "limit": 2})
    with st.data.open(st.load_config(settings), held_out=True) as opened:
        assert len(opened) == 2 and opened[0]["dataset"] == "others"
