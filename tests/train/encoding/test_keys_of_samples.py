"""The cache key of latents depends on everything that determines them and on nothing else: one test per ingredient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supertuner.arena.home import ArenaHome
from supertuner.arena.run_context import RunContext
from supertuner.cache.keys import CacheNamespace
from supertuner.config.settings.data import CaptionSettings, DatasetSettings
from supertuner.core.types import MediaKind
from supertuner.data.batching import render
from supertuner.data.batching.augment import AugmentationParams
from supertuner.data.batching.captions import DROPPED_CAPTION, choose_caption_index, draw_caption, possible_captions
from supertuner.data.batching.sample_rng import SampleRng
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.ordering.buckets import Bucket
from supertuner.data.staging.stager import DatasetStager
from supertuner.step.precision import latent_storage_dtype
from supertuner.train.encoding.cache_plan import media_keys
from tests.data.media_files import write
from tests.train.encoding.encoding_helpers import pictures, sounds, videos

NAMESPACE = CacheNamespace("latents", "vae", "bfloat16")


def corpus(tmp_path: Path, folder: Path, seed: int = 5, **settings) -> Corpus:
    block = {"id": "set", "resolution": 32, "bucket_step": 16, "instance_data_dir": folder, **settings}
    dataset = DatasetSettings.model_validate(block)
    stager = DatasetStager(ArenaHome(tmp_path / "ram"), RunContext.silent(tmp_path))
    return build_corpus([(dataset, stager.open(dataset)[1])], seed=seed, batch_size=2)


def keys(corpus: Corpus, namespace: CacheNamespace = NAMESPACE, epoch: int = 0) -> dict[str, bytes]:
    """Sample's name → cache key of its draw in an epoch."""
    draws = corpus.order.slice(corpus.order.epoch_begin(epoch), corpus.order.epoch_begin(epoch + 1))
    names = [corpus.datasets[0].samples.key(sample) for sample in draws.sample.tolist()]
    return dict(zip(names, map(bytes, media_keys(corpus, draws, namespace)), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pictures(tmp_path / "images", 3)


def test_keys_differ_between_samples_and_do_not_depend_on_order_seed_or_epoch(tmp_path: Path, folder: Path) -> None:
    plain = keys(corpus(tmp_path, folder))
    assert len(set(plain.values())) == 3
    assert keys(corpus(tmp_path, folder, seed=6)) == plain
    assert keys(corpus(tmp_path, folder), epoch=3) == plain
    assert keys(corpus(tmp_path, folder, id="other", repeats=2, captions={"dropout": 0.5})) == plain


def test_the_file_s_bytes_change_the_key(tmp_path: Path, folder: Path) -> None:
    before = keys(corpus(tmp_path, folder))
    (folder / "p1.jpg").write_bytes((folder / "p2.jpg").read_bytes())
    after = keys(corpus(tmp_path, folder))
    assert after["p1"] == after["p2"] != before["p1"] and after["p0"] == before["p0"]


def test_the_file_s_name_and_folder_do_not_change_the_key(tmp_path: Path, folder: Path) -> None:
    before = keys(corpus(tmp_path, folder))
    write(tmp_path / "moved", {"deep/renamed.jpg": (folder / "p1.jpg").read_bytes()})
    assert set(keys(corpus(tmp_path, tmp_path / "moved")).values()) == {before["p1"]}


@pytest.mark.parametrize(
    "changed",
    [
        {"resolution": 48},
        {"resize_filter": "area"},
        {"augment": {"flip": 1.0}},
        {"augment": {"crop_jitter": 1.0}},
        {"augment": {"brightness": 0.5}},
        {"augment": {"contrast": 0.5}},
        {"augment": {"saturation": 0.5}},
        {"augment": {"hue": 0.5}},
        {"crop": "random"},
    ],
    ids=str,
)
def test_every_part_of_the_transform_changes_the_key(tmp_path: Path, folder: Path, changed: dict) -> None:
    before, after = keys(corpus(tmp_path, folder)), keys(corpus(tmp_path, folder, **changed))
    assert not set(before.values()) & set(after.values())


def test_equal_augmentations_of_two_cycles_have_equal_keys(tmp_path: Path, folder: Path) -> None:
    flipped = corpus(tmp_path, folder, augment={"flip": 0.5})
    by_epoch = [keys(flipped, epoch=epoch)["p0"] for epoch in range(12)]
    assert len(set(by_epoch)) == 2, "flipped or not"
    assert keys(corpus(tmp_path, folder))["p0"] in by_epoch


def test_frames_and_frame_rate_of_videos_change_the_key(tmp_path: Path) -> None:
    folder = videos(tmp_path / "videos")
    plain = {"dataset_type": "video", "frames": 5}
    before = set(keys(corpus(tmp_path, folder, **plain)).values())
    assert not before & set(keys(corpus(tmp_path, folder, dataset_type="video", frames=9)).values())
    assert not before & set(keys(corpus(tmp_path, folder, **plain, fps=12.0)).values())
    assert not before & set(keys(corpus(tmp_path, folder, **plain, crop="random")).values())


def test_sample_rate_channels_and_length_of_audio_change_the_key(tmp_path: Path) -> None:
    folder = sounds(tmp_path / "sounds", 1)
    plain = {"sample_rate": 16_000, "channels": 2, "step_seconds": 0.25, "max_seconds": 1.0}
    changes = ({}, {"sample_rate": 8000}, {"channels": 1}, {"step_seconds": 0.125, "max_seconds": 0.375})
    key_sets = [keys(corpus(tmp_path, folder, dataset_type="audio", audio={**plain, **change})) for change in changes]
    assert len({key for key_set in key_sets for key in key_set.values()}) == 4


def test_the_render_version_changes_the_key() -> None:
    bucket = Bucket(MediaKind.IMAGE, 32, 32, 1, channels=3)
    rendering = (DatasetSettings(), bucket, AugmentationParams())
    version = render.RENDER_VERSION
    assert render.transform_key_bytes(*rendering) == render.transform_key_bytes(*rendering, version=version)
    assert render.transform_key_bytes(*rendering) != render.transform_key_bytes(*rendering, version=version + 1)


def test_an_image_and_a_video_of_the_same_size_have_different_keys() -> None:
    image, clip = (Bucket(kind, 32, 32, 1, channels=3) for kind in (MediaKind.IMAGE, MediaKind.VIDEO))
    settings, augmentation = DatasetSettings(), AugmentationParams()
    image_key = render.transform_key_bytes(settings, image, augmentation)
    assert image_key != render.transform_key_bytes(settings, clip, augmentation)


def test_encoder_and_precision_change_the_key(tmp_path: Path, folder: Path) -> None:
    images = corpus(tmp_path, folder)
    others = [CacheNamespace("latents", "vae 2", "bfloat16"), CacheNamespace("latents", "vae", "float32")]
    assert len({key for namespace in (NAMESPACE, *others) for key in keys(images, namespace).values()}) == 9
    assert latent_storage_dtype(torch.float32) is torch.float32
    assert latent_storage_dtype(torch.float16) is latent_storage_dtype(torch.bfloat16) is torch.bfloat16


def test_the_key_follows_from_the_stored_bytes_without_decompression(tmp_path: Path, folder: Path) -> None:
    packed = corpus(tmp_path, folder, in_memory={"compression": "zstd"})
    assert not set(keys(packed).values()) & set(keys(corpus(tmp_path, folder)).values())
    assert packed.datasets[0].samples.content_digests().shape == (3, 4)


def test_a_hundred_thousand_keys_take_less_than_a_second() -> None:
    import time

    rows = np.random.default_rng(0).integers(0, 1 << 63, (100_000, 4), dtype=np.uint64)
    began = time.process_time()
    entry_keys = NAMESPACE.entry_keys((row.tobytes() for row in rows), b"transform")
    assert len(np.unique(entry_keys)) == 100_000 and time.process_time() - began < 1.0


RULES = st.builds(
    CaptionSettings,
    several=st.booleans(),
    choose=st.sampled_from(["random", "first"]),
    trigger_word=st.sampled_from([None, "sks"]),
    dropout=st.sampled_from([0.0, 0.3, 1.0]),
    shuffle_tags=st.booleans(),
    keep_tags=st.integers(0, 2),
)
TEXTS = st.lists(st.text("ab ,[]sktrige", max_size=20), max_size=4)


@given(TEXTS, RULES, st.integers(0, 1000))
def test_listed_captions_are_those_that_are_drawn(captions: list[str], rules: CaptionSettings, cycle: int) -> None:
    rng = SampleRng(1, "set", "sample", cycle)
    possible = possible_captions(captions, rules, rng)
    index = choose_caption_index(len(possible), rules, rng)
    assert draw_caption(captions, rules, rng) == ("" if index == DROPPED_CAPTION else possible[index])
