"""EncodedCorpus: gives the same bits with every kind of cache, encodes each sample once, and refuses unusable data."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from supertuner.arena.run_context import RunContext
from supertuner.core.errors import CacheError, ModelError
from supertuner.core.events import MeasurementEvent
from supertuner.core.host import HostFacts
from supertuner.core.types import MediaKind
from supertuner.data.batching.decoder_pool import DecoderPool
from supertuner.data.batching.render import caption_for_sample
from supertuner.data.corpus_loader import open_corpus
from supertuner.train.encoding.corpus_caches import open_encoded_corpus
from tests.data.media_files import png_claiming
from tests.data.staging import RecordingSink
from tests.train.encoding.encoding_helpers import (
    SoundEncoder,
    arenas,
    batches,
    config_of,
    encoding_spec,
    equal,
    open_run,
    pictures,
    read_all_positions,
    sounds,
    videos,
    with_counting_encoders,
    without_caches,
)


def mixed(tmp_path: Path, cache: dict | None = None, **more):
    """Images and videos, several captions, dropout, and two datasets that share a bucket."""
    images = pictures(tmp_path / "images", 5)
    return config_of(
        tmp_path,
        {"instance_data_dir": images, "captions": {"dropout": 0.3, "trigger_word": "sks"}},
        {"instance_data_dir": pictures(tmp_path / "more", 3), "resize_filter": "area"},
        {"instance_data_dir": videos(tmp_path / "videos"), "dataset_type": "video", "frames": [5, 9]},
        cache=cache,
        **more,
    )


@pytest.mark.parametrize(
    "cache",
    [
        {},
        {"persistent_cache": True},
        {"vae_cache_type": "disk", "text_cache_type": "disk"},
        {"vae_cache_type": "disk", "text_cache_type": "disk", "persistent_cache": True},
        {"vae_cache_type": "none"},
        {"text_cache_type": "none"},
    ],
    ids=str,
)
def test_every_kind_of_cache_gives_the_bits_of_encoding_on_the_fly(tmp_path: Path, wan, cache: dict) -> None:
    config = mixed(tmp_path, cache)
    encoding = encoding_spec(*wan)
    with open_run(without_caches(config), encoding) as plain:
        expected = read_all_positions(*plain)
    for _ in range(2):  # first the cache is filled, then it is found
        with open_run(config, encoding) as cached:
            assert equal(read_all_positions(*cached), expected)
    assert all(latents["latents"].dtype == torch.bfloat16 for latents, _ in expected.values())


def test_latents_and_texts_are_the_encoders_outputs_for_the_decoded_batch(tmp_path: Path, wan) -> None:
    config = mixed(tmp_path)
    encoding = encoding_spec(*wan)
    family, model = wan
    media = family.build_media_encoder(model, encoding.device)
    text = family.build_text_encoder(model, encoding.device, encoding.dtype)
    with open_run(config, encoding) as (corpus, encoded), DecoderPool(corpus, 2) as decoders:
        for micro in batches(corpus):
            batch = decoders.decode(micro)
            assert torch.equal(encoded.latents(micro)["latents"], media.encode(batch.media)["latents"].bfloat16())
            for mine, theirs in zip(encoded.texts(micro), text.encode(batch.captions), strict=True):
                assert torch.equal(mine["embeds"], theirs["embeds"])


def test_flux_is_cached_with_the_same_bits(tmp_path: Path, flux) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images"), "bucket_step": 16})
    with open_run(without_caches(config), encoding_spec(*flux)) as plain:
        expected = read_all_positions(*plain)
    with open_run(config, encoding_spec(*flux)) as cached:
        assert equal(read_all_positions(*cached), expected)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_second_run_builds_no_encoder_if_the_cache_is_persistent(tmp_path: Path, wan, persistent: bool) -> None:
    config = mixed(tmp_path, {"persistent_cache": persistent})
    family, count = with_counting_encoders(wan[0])
    with open_run(config, encoding_spec(family, wan[1])) as (corpus, encoded):
        assert count.made == ["media", "text"] and count.samples == 10
        read_all_positions(corpus, encoded)
        assert count.samples == 10, "nothing is encoded during training"
        assert sorted(set(count.captions)) == sorted(count.captions), "each text is encoded once"
        assert "" in count.captions and "sks, red, round, number 3" in count.captions
    family, count = with_counting_encoders(wan[0])
    with open_run(config, encoding_spec(family, wan[1])):
        assert count.made == ([] if persistent else ["media", "text"])
    kept = [name for name in arenas(tmp_path / "runs" / "cache") if name.startswith(("latents", "text"))]
    assert len(kept) == (2 if persistent else 0)
    assert not [name for name in arenas(tmp_path / "ram") if name.startswith(("latents", "text"))], (
        "removed when the run ends"
    )


def test_only_the_new_samples_of_a_grown_dataset_are_encoded(tmp_path: Path, wan) -> None:
    folder = pictures(tmp_path / "images", 4)
    config = config_of(tmp_path, {"instance_data_dir": folder}, cache={"persistent_cache": True})
    with open_run(config, encoding_spec(*wan)):
        pass
    pictures(folder, 6)
    family, count = with_counting_encoders(wan[0])
    with open_run(config, encoding_spec(family, wan[1])):
        assert count.samples == 2 and len(count.captions) == 2


def test_equal_files_under_two_names_are_encoded_once(tmp_path: Path, wan) -> None:
    folder = pictures(tmp_path / "images", 3)
    (folder / "copy.jpg").write_bytes((folder / "p0.jpg").read_bytes())
    family, count = with_counting_encoders(wan[0])
    config = config_of(tmp_path, {"instance_data_dir": folder}, {"instance_data_dir": pictures(tmp_path / "b", 3)})
    with open_run(config, encoding_spec(family, wan[1])):
        assert count.samples == 3


def test_encoding_shows_progress_and_emits_figures(tmp_path: Path, wan) -> None:
    sink = RecordingSink()
    with open_run(mixed(tmp_path), encoding_spec(*wan), sink):
        pass
    assert ("encoding samples", 10, 0) in sink.phases
    assert [title for title, _, _ in sink.phases] == ["encoding samples", "encoding captions"]
    figures = {event.what: event.figures for event in sink.events if isinstance(event, MeasurementEvent)}
    assert figures["cache.latents"]["made"] == 10


def test_a_run_that_ends_within_an_epoch_encodes_only_the_samples_it_draws(tmp_path: Path, wan) -> None:
    family, count = with_counting_encoders(wan[0])
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 8)})
    with open_run(config, encoding_spec(family, wan[1]), until=3) as (corpus, encoded):
        assert count.samples == 3 and len(count.captions) == 3
        first, *_, last = batches(corpus)
        encoded.latents(first)
        encoded.texts(first)
        assert count.samples == 3
        beyond = encoded.latents(last), encoded.texts(last)
    with open_run(config, encoding_spec(*wan)) as (_, encoded):
        assert torch.equal(beyond[0]["latents"], encoded.latents(last)["latents"]), (
            "an unplanned sample is encoded when it is used"
        )
        assert all(torch.equal(a["embeds"], b["embeds"]) for a, b in zip(beyond[1], encoded.texts(last), strict=True))


def test_held_out_data_share_cache_entries_with_training_data(tmp_path: Path, wan) -> None:
    encoding = encoding_spec(*wan)
    train = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 4)})
    held = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "held", 6), "id": "held"})
    family, count = with_counting_encoders(wan[0])
    with open_run(train, encoding) as trained, open_run(held, encoding_spec(family, wan[1])) as held_out:
        assert count.samples == 2, "four of the six images equal training images, which are encoded already"
        assert len(read_all_positions(*trained)) == 8 and len(read_all_positions(*held_out)) == 12


def test_an_unsupported_bucket_is_refused_before_anything_is_encoded(tmp_path: Path, wan) -> None:
    family, count = with_counting_encoders(wan[0])
    folder = videos(tmp_path / "videos")
    config = config_of(tmp_path, {"instance_data_dir": folder, "dataset_type": "video", "frames": 6})
    with pytest.raises(ModelError) as caught, open_run(config, encoding_spec(family, wan[1])):
        pass
    message = str(caught.value)
    assert "datasets[set0]" in message and "6 frames" in message and "frames of that dataset" in message
    assert not count.made


def test_audio_is_refused_by_an_image_and_video_model(tmp_path: Path, wan) -> None:
    config = config_of(tmp_path, {"instance_data_dir": sounds(tmp_path / "sounds"), "dataset_type": "audio"})
    config = config.model_copy(
        update={"datasets": (config.datasets[0].model_copy(update={"audio": short_sounds(config)}),)}
    )
    with pytest.raises(ModelError, match="image and video, not on audio"), open_run(config, encoding_spec(*wan)):
        pass


def short_sounds(config):
    return config.datasets[0].audio.model_copy(
        update={"sample_rate": 16_000, "channels": 1, "step_seconds": 0.25, "max_seconds": 1.0}
    )


def test_audio_is_cached_with_the_same_bits(tmp_path: Path, wan) -> None:
    family = dataclasses.replace(
        wan[0], build_media_encoder=lambda *_: SoundEncoder(), unsupported_reason=lambda *_: None
    )
    model = dataclasses.replace(wan[1], media_kinds=frozenset({MediaKind.AUDIO}))
    config = config_of(tmp_path, {"instance_data_dir": sounds(tmp_path / "sounds", 5), "dataset_type": "audio"})
    config = config.model_copy(
        update={"datasets": (config.datasets[0].model_copy(update={"audio": short_sounds(config)}),)}
    )
    with open_run(without_caches(config), encoding_spec(family, model)) as plain:
        expected = read_all_positions(*plain)
    with open_run(config, encoding_spec(family, model)) as cached:
        assert equal(read_all_positions(*cached), expected)
    shapes = {tuple(latents["latents"].shape) for latents, _ in expected.values()}
    assert len(shapes) >= 2 and all("loudness" in latents for latents, _ in expected.values())


def test_a_file_that_does_not_decode_is_named_together_with_the_stricter_check(tmp_path: Path, wan) -> None:
    folder = pictures(tmp_path / "images", 3)
    (folder / "p9.png").write_bytes(png_claiming(64, 64))  # its structure is complete, its pixels are not
    config = config_of(tmp_path, {"instance_data_dir": folder})
    with pytest.raises(CacheError) as caught, open_run(config, encoding_spec(*wan)):
        pass
    assert "'p9'" in str(caught.value) and 'check: "decode"' in str(caught.value)


def test_a_damaged_entry_of_a_persistent_cache_is_encoded_again_before_it_is_used(tmp_path: Path, wan) -> None:
    config = config_of(
        tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 4)}, cache={"persistent_cache": True}
    )
    with open_run(config, encoding_spec(*wan)) as cached:
        expected = read_all_positions(*cached)
    data = next((tmp_path / "runs" / "cache").glob("latents-*/0000.data"))
    content = bytearray(data.read_bytes())
    content[4096 + 10] ^= 1
    data.write_bytes(content)
    sink = RecordingSink()
    family, count = with_counting_encoders(wan[0])
    with open_run(config, encoding_spec(family, wan[1]), sink) as cached:
        assert equal(read_all_positions(*cached), expected)
    assert count.samples == 1 and "made again" in sink.warnings()


def test_a_damaged_entry_of_a_mapped_file_raises_an_error_with_file_and_remedy(tmp_path: Path, wan) -> None:
    cache = {"persistent_cache": True, "vae_cache_type": "disk"}
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 4)}, cache=cache)
    with open_run(config, encoding_spec(*wan)):
        pass
    data = next((tmp_path / "runs" / "cache").glob("latents-*/0000.data"))
    content = bytearray(data.read_bytes())
    content[4096 + 10] ^= 1
    data.write_bytes(content)
    with open_run(config, encoding_spec(*wan)) as cached, pytest.raises(CacheError, match=r"0000\.data.*cache build"):
        read_all_positions(*cached)


def test_a_cache_that_will_not_fit_is_refused_before_the_disk_is_full(
    tmp_path: Path, wan, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 4)}, cache={"persistent_cache": True}
    )
    context = RunContext.silent(tmp_path / "run")
    with open_corpus(config, context) as corpus:
        monkeypatch.setattr(HostFacts, "free_bytes", lambda self, folder: 9000)
        with (
            pytest.raises(CacheError, match=r"4 entries need about .* missing; .*cache_dir"),
            open_encoded_corpus(config, corpus, encoding_spec(*wan), context),
        ):
            pass


def test_a_folder_with_other_files_is_not_used_as_a_cache(tmp_path: Path, wan) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.jpg").write_bytes(b"")
    cache = {"persistent_cache": True, "cache_dir": tmp_path / "photos"}
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 2)}, cache=cache)
    with pytest.raises(CacheError, match=r"mine\.jpg.*cache_config\.cache_dir"), open_run(config, encoding_spec(*wan)):
        pass
    assert (tmp_path / "photos" / "mine.jpg").exists()


def test_cached_captions_are_those_that_are_drawn(tmp_path: Path, wan) -> None:
    folder = pictures(tmp_path / "images", 5, captions=False)
    for number in range(4):
        (folder / f"p{number}.txt").write_text("\n".join(f"a {n}, b, [trigger]" for n in range(number)))
    rules = {"several": True, "dropout": 0.25, "trigger_word": "sks"}
    config = config_of(tmp_path, {"instance_data_dir": folder, "captions": rules})
    encoding = encoding_spec(*wan)
    text = wan[0].build_text_encoder(wan[1], encoding.device, encoding.dtype)
    seen = set()
    with open_run(config, encoding) as (corpus, encoded):
        for micro in batches(corpus, epochs=6):
            rows = zip(micro.draws.sample.tolist(), micro.draws.cycle.tolist(), strict=True)
            captions = [caption_for_sample(corpus.seed, corpus.datasets[0], sample, cycle) for sample, cycle in rows]
            seen.update(captions)
            for mine, theirs in zip(encoded.texts(micro), text.encode(captions), strict=True):
                assert torch.equal(mine["embeds"], theirs["embeds"])
    assert {"", "sks", "a 0, b, sks", "a 2, b, sks"} <= seen


def test_writing_to_a_batch_s_latents_does_not_change_the_cache(tmp_path: Path, wan) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 4)})
    with open_run(config, encoding_spec(*wan)) as (corpus, encoded):
        micro = batches(corpus)[0]
        first = encoded.latents(micro)["latents"]
        before = first.clone()
        first.zero_()
        assert torch.equal(encoded.latents(micro)["latents"], before)
        assert np.unique(micro.draws.sample).size == len(micro)


@pytest.mark.parametrize("cache", [{}, {"persistent_cache": True}, {"vae_cache_type": "disk"}])
def test_a_failure_at_the_second_cache_closes_the_first(tmp_path: Path, wan, cache: dict) -> None:
    """Checked while the exception, and with it every frame of its traceback, is still referenced."""
    family, model = wan
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 3)}, cache=cache)

    class Broken:
        def __init__(self, *args) -> None:
            raise ModelError("the text encoder is not there; put it back")

    broken = dataclasses.replace(family, build_text_encoder=Broken)
    with pytest.raises(ModelError) as caught, open_run(config, encoding_spec(broken, model)):
        pass
    assert "put it back" in str(caught.value)
    maps = Path("/proc/self/maps").read_text().splitlines()
    open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [path for path in (*maps, *open_files) if str(tmp_path) in path and "/latents-" in path] == []
