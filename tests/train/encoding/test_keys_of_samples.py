"""The key of a sample's latents covers everything that decides them, and nothing else: one test for each ingredient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from supertuner.arena.home import ArenaHome
from supertuner.cache.keys import CacheNamespace
from supertuner.config.settings.data import CaptionSettings, DatasetSettings
from supertuner.core.events import NullSink
from supertuner.core.host import HostFacts
from supertuner.data import content_key as content
from supertuner.data.batching.augment import AugmentationParams
from supertuner.data.batching.caption_variants import DROPPED_CAPTION, choose_caption_index, possible_captions
from supertuner.data.batching.captions import draw_caption
from supertuner.data.batching.sample_rng import SampleRng
from supertuner.data.corpus import Corpus, build_corpus
from supertuner.data.staging.stager import DatasetStager
from supertuner.step.precision import latent_storage_dtype
from supertuner.train.encoding.media import media_keys
from tests.cache.encoding import pictures, sounds, videos
from tests.data.media_files import write

SPACE = CacheNamespace("latents", "vae", "bfloat16")


def corpus(tmp_path: Path, folder: Path, seed: int = 5, **settings) -> Corpus:
    given = {"id": "set", "resolution": 32, "bucket_step": 16, **settings}
    dataset = DatasetSettings.model_validate({**given, "instance_data_dir": folder})
    stager = DatasetStager(ArenaHome(tmp_path / "ram"), HostFacts(), NullSink(), NullSink())
    return build_corpus([(dataset, stager.open(dataset)[1])], seed=seed, batch_size=2)


def keys(of: Corpus, space: CacheNamespace = SPACE, epoch: int = 0) -> dict[str, bytes]:
    """Keys of an epoch's draws by the samples' names."""
    draws = of.order.slice(of.order.epoch_begin(epoch), of.order.epoch_begin(epoch + 1))
    names = [of.datasets[0].samples.key(sample) for sample in draws.sample.tolist()]
    return dict(zip(names, map(bytes, media_keys(of, draws, space)), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pictures(tmp_path / "images", 3)


def test_samples_have_keys_of_their_own_that_do_not_depend_on_order_seed_or_epoch(tmp_path: Path, folder: Path) -> None:
    plain = keys(corpus(tmp_path, folder))
    assert len(set(plain.values())) == 3
    assert keys(corpus(tmp_path, folder, seed=6)) == plain
    assert keys(corpus(tmp_path, folder), epoch=3) == plain
    assert keys(corpus(tmp_path, folder, id="other", repeats=2, captions={"dropout": 0.5})) == plain


def test_content_is_an_ingredient(tmp_path: Path, folder: Path) -> None:
    before = keys(corpus(tmp_path, folder))
    (folder / "p1.jpg").write_bytes((folder / "p2.jpg").read_bytes())
    after = keys(corpus(tmp_path, folder))
    assert after["p1"] == after["p2"] != before["p1"] and after["p0"] == before["p0"]


def test_a_file_s_name_and_place_are_none(tmp_path: Path, folder: Path) -> None:
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
def test_every_part_of_the_transform_is_an_ingredient(tmp_path: Path, folder: Path, changed: dict) -> None:
    before, after = keys(corpus(tmp_path, folder)), keys(corpus(tmp_path, folder, **changed))
    assert not set(before.values()) & set(after.values())


def test_another_turn_s_change_is_another_key_and_an_equal_change_the_same(tmp_path: Path, folder: Path) -> None:
    flipped = corpus(tmp_path, folder, augment={"flip": 0.5})
    found = [keys(flipped, epoch=epoch)["p0"] for epoch in range(12)]
    assert len(set(found)) == 2, "flipped or not"
    assert keys(corpus(tmp_path, folder))["p0"] in found


def test_frames_and_rate_of_videos_are_ingredients(tmp_path: Path) -> None:
    folder = videos(tmp_path / "videos")
    plain = {"dataset_type": "video", "frames": 5}
    before = set(keys(corpus(tmp_path, folder, **plain)).values())
    assert not before & set(keys(corpus(tmp_path, folder, dataset_type="video", frames=9)).values())
    assert not before & set(keys(corpus(tmp_path, folder, **plain, fps=12.0)).values())
    assert not before & set(keys(corpus(tmp_path, folder, **plain, crop="random")).values())


def test_rate_channels_and_length_of_sounds_are_ingredients(tmp_path: Path) -> None:
    folder = sounds(tmp_path / "sounds", 1)
    plain = {"sample_rate": 16_000, "channels": 2, "step_seconds": 0.25, "max_seconds": 1.0}
    changes = ({}, {"sample_rate": 8000}, {"channels": 1}, {"step_seconds": 0.125, "max_seconds": 0.375})
    found = [keys(corpus(tmp_path, folder, dataset_type="audio", audio={**plain, **change})) for change in changes]
    assert len({key for one in found for key in one.values()}) == 4


def test_the_version_of_decoding_is_an_ingredient() -> None:
    group = (DatasetSettings(), corpus_bucket(), AugmentationParams())
    assert content.transform_key_bytes(*group) == content.transform_key_bytes(*group, version=content.RENDER_VERSION)
    assert content.transform_key_bytes(*group) != content.transform_key_bytes(
        *group, version=content.RENDER_VERSION + 1
    )


def corpus_bucket():
    from supertuner.core.types import MediaKind
    from supertuner.data.ordering.buckets import Bucket

    return Bucket(MediaKind.IMAGE, 32, 32, 1, channels=3)


def test_a_picture_and_a_video_of_the_same_size_are_not_confused() -> None:
    from supertuner.core.types import MediaKind
    from supertuner.data.ordering.buckets import Bucket

    image, clip = (Bucket(kind, 32, 32, 1, channels=3) for kind in (MediaKind.IMAGE, MediaKind.VIDEO))
    assert content.transform_key_bytes(DatasetSettings(), image, AugmentationParams()) != content.transform_key_bytes(
        DatasetSettings(), clip, AugmentationParams()
    )


def test_encoder_and_number_format_are_ingredients(tmp_path: Path, folder: Path) -> None:
    of = corpus(tmp_path, folder)
    spaces = [SPACE, CacheNamespace("latents", "vae 2", "bfloat16"), CacheNamespace("latents", "vae", "float32")]
    assert len({key for space in spaces for key in keys(of, space).values()}) == 9
    assert latent_storage_dtype(torch.float32) is torch.float32
    assert latent_storage_dtype(torch.float16) is latent_storage_dtype(torch.bfloat16) is torch.bfloat16


def test_how_a_file_is_stored_decides_its_key_so_that_no_unpacking_is_needed(tmp_path: Path, folder: Path) -> None:
    packed = corpus(tmp_path, folder, in_memory={"compression": "zstd"})
    assert not set(keys(packed).values()) & set(keys(corpus(tmp_path, folder)).values())
    assert packed.datasets[0].samples.content_digests().shape == (3, 4)


def test_a_hundred_thousand_keys_take_less_than_a_second() -> None:
    import time

    rows = np.random.default_rng(0).integers(0, 1 << 63, (100_000, 4), dtype=np.uint64)
    began = time.process_time()
    made = SPACE.entry_keys((row.tobytes() for row in rows), b"transform")
    assert len(np.unique(made)) == 100_000 and time.process_time() - began < 1.0


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
def test_listed_captions_are_those_that_are_drawn(captions: list[str], rules: CaptionSettings, turn: int) -> None:
    chance = SampleRng(1, "set", "sample", turn)
    possible = possible_captions(captions, rules, chance)
    number = choose_caption_index(len(possible), rules, chance)
    assert draw_caption(captions, rules, chance) == ("" if number == DROPPED_CAPTION else possible[number])
