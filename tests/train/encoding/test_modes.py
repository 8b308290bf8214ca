"""Cache modes of augmented samples: static variations, refreshed each epoch, or not cached."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from supertuner.cache.epoch_rotation import EpochRotation
from supertuner.core.errors import CacheError
from supertuner.core.events import DecisionEvent, MeasurementEvent
from supertuner.data.ordering.micro_batches import MicroBatch
from tests.data.staging import RecordingSink
from tests.train.encoding.encoding_helpers import (
    arenas,
    batches,
    config_of,
    encoding_spec,
    equal,
    open_run,
    pictures,
    read_all_positions,
    with_counting_encoders,
    without_caches,
)

VARYING = {"augment": {"flip": 0.5, "brightness": 0.4}, "captions": {"shuffle_tags": True, "dropout": 0.2}}


def config(tmp_path: Path, mode: str | None, count: int = 4, cache: dict | None = None, **more):
    """One augmented dataset and one without augmentation, in the same bucket."""
    augmented = {"instance_data_dir": pictures(tmp_path / "images", count), **VARYING, **more}
    if mode is not None:
        augmented["augmentations_cache_mode"] = mode
    return config_of(tmp_path, augmented, {"instance_data_dir": pictures(tmp_path / "plain", 2)}, cache=cache)


def cached(folder: Path) -> list[str]:
    return [name for name in arenas(folder) if name.startswith(("latents", "text"))]


def test_static_is_the_default_mode_and_a_warning_says_so(tmp_path: Path, wan) -> None:
    sink = RecordingSink()
    with open_run(config(tmp_path, None), encoding_spec(*wan), sink) as run:
        by_default = read_all_positions(*run)
    with open_run(config(tmp_path, "static"), encoding_spec(*wan)) as run:
        assert equal(read_all_positions(*run), by_default)
    warning = sink.warnings()
    assert "datasets[set0].augmentations_cache_mode" in warning and '"static" applies' in warning
    assert "augment.flip, augment.brightness, captions.shuffle_tags" in warning
    assert "set1" not in warning


def test_a_sample_that_the_plan_omits_is_encoded_in_the_variation_that_a_cache_would_hold(tmp_path: Path, wan) -> None:
    """A plan until position 1 contains one sample of the first epoch; all others are encoded when they are used."""
    run_config = config(tmp_path, "static", variations=2)
    with open_run(run_config, encoding_spec(*wan)) as run:
        cached_positions = read_all_positions(*run, epochs=4)
    with open_run(run_config, encoding_spec(*wan), until=1) as run:
        assert equal(read_all_positions(*run, epochs=4), cached_positions)


def test_decisions_say_where_entries_of_single_epochs_are_and_that_none_is_kept(tmp_path: Path, wan) -> None:
    augmented = {"instance_data_dir": pictures(tmp_path / "images", 4), **VARYING}
    run_config = config_of(
        tmp_path, {**augmented, "augmentations_cache_mode": "refresh_each_epoch"}, cache={"persistent_cache": True}
    )
    sink = RecordingSink()
    with open_run(run_config, encoding_spec(*wan), sink, until=8):
        pass
    decisions = [event for event in sink.events if isinstance(event, DecisionEvent) and event.what.startswith("cache.")]
    assert [event.what for event in decisions] == ["cache.latents.each_epoch", "cache.text.each_epoch"]
    for event in decisions:
        assert event.value == str(tmp_path / "ram") and "removed" in event.reason and "kept" not in event.reason
    assert cached(tmp_path / "runs" / "cache") == cached(tmp_path / "ram") == []


def test_a_mode_without_effect_causes_a_warning(tmp_path: Path, wan) -> None:
    sink = RecordingSink()
    plain = {"instance_data_dir": pictures(tmp_path / "images", 2), "augmentations_cache_mode": "static"}
    with open_run(config_of(tmp_path, plain), encoding_spec(*wan), sink):
        assert "has no effect" in sink.warnings()


def test_static_repeats_a_sample_s_variations_cyclically(tmp_path: Path, wan) -> None:
    family, count = with_counting_encoders(wan[0])
    static = config(tmp_path, "static", variations=2)
    with open_run(without_caches(static), encoding_spec(*wan)) as (corpus, encoded):
        expected = by_sample(corpus, encoded, epochs=2)
    with open_run(static, encoding_spec(family, wan[1])) as (corpus, encoded):
        encoded_before = count.samples
        by_cycle = by_sample(corpus, encoded, epochs=6)
        assert count.samples == encoded_before <= 4 * 2 + 2, "nothing is encoded during training"
    for (dataset, sample, cycle), latents in by_cycle.items():
        assert torch.equal(latents, expected[dataset, sample, cycle % 2])


def by_sample(corpus, encoded, epochs: int) -> dict[tuple[int, int, int], torch.Tensor]:
    """Latents by dataset, sample and cycle."""
    latents_by_sample = {}
    for micro in batches(corpus, epochs):
        latents, draws = encoded.latents(micro)["latents"], micro.draws
        for row, sample_latents in enumerate(latents):
            dataset = corpus.order.groups[int(draws.group[row])].dataset_index
            latents_by_sample[dataset, int(draws.sample[row]), int(draws.cycle[row])] = sample_latents.clone()
    return latents_by_sample


def test_static_still_draws_caption_choice_and_dropout_in_every_cycle(tmp_path: Path, wan) -> None:
    """Only the order of tags is fixed: a caption that is dropped in one cycle appears in another."""
    lengths: dict[int, set[int]] = {}
    with open_run(config(tmp_path, "static"), encoding_spec(*wan)) as (corpus, encoded):
        for micro in batches(corpus, epochs=12):
            for row, text in enumerate(encoded.texts(micro)):
                if corpus.order.groups[int(micro.draws.group[row])].dataset_index == 0:
                    lengths.setdefault(int(micro.draws.sample[row]), set()).add(len(text["embeds"]))
    assert any(len(sample_lengths) > 1 for sample_lengths in lengths.values())


def test_disable_cache_encodes_on_the_fly_and_still_caches_other_datasets(tmp_path: Path, wan) -> None:
    family, count = with_counting_encoders(wan[0])
    run_config = config(tmp_path, "disable_cache")
    with open_run(without_caches(run_config), encoding_spec(*wan)) as run:
        expected = read_all_positions(*run)
    with open_run(run_config, encoding_spec(family, wan[1])) as run:
        assert count.samples == 2, "the two images without augmentation"
        assert equal(read_all_positions(*run), expected)
        assert count.samples == 2 + 2 * 4


@pytest.mark.parametrize("kind", ["unified_memory", "disk"])
def test_refresh_each_epoch_gives_the_bits_of_encoding_on_the_fly(tmp_path: Path, wan, kind: str) -> None:
    cache = {"vae_cache_type": kind, "text_cache_type": kind, "persistent_cache": True}
    run_config = config(tmp_path, "refresh_each_epoch", cache=cache)
    with open_run(without_caches(run_config), encoding_spec(*wan)) as run:
        expected = read_all_positions(*run, epochs=4)
    with open_run(run_config, encoding_spec(*wan), until=24) as run:
        assert equal(read_all_positions(*run, epochs=4), expected)
    persistent, ram = cached(tmp_path / "runs" / "cache"), cached(tmp_path / "ram")
    assert not any("epoch" in name for name in persistent + ram), "an epoch's entries are removed with it"
    assert len(persistent) == 2, "entries without augmentation are kept"


def test_an_epoch_s_entries_are_made_in_the_background_and_removed_afterwards(tmp_path: Path, wan) -> None:
    sink = RecordingSink()
    with open_run(config(tmp_path, "refresh_each_epoch"), encoding_spec(*wan), sink, until=24) as (corpus, encoded):
        plain = {name for name in cached(tmp_path / "ram") if "epoch" not in name}
        seen = []
        for micro in batches(corpus, epochs=4):
            encoded.latents(micro)
            encoded.texts(micro)
            names = set(cached(tmp_path / "ram"))
            assert plain <= names, "entries of the other dataset stay"
            seen.append({name.split("-epoch")[1].split("-")[0] for name in names - plain})
        assert "0" in seen[0] and "0" not in seen[-1] and "1" not in seen[-1]
    epochs = [
        event.figures["epoch"]
        for event in sink.events
        if isinstance(event, MeasurementEvent) and event.what == "cache.epoch"
    ]
    assert epochs == [0, 1, 2, 3]


def test_batches_across_epochs_in_any_order_have_the_same_bits(tmp_path: Path, wan) -> None:
    run_config = config(tmp_path, "refresh_each_epoch")
    with open_run(without_caches(run_config), encoding_spec(*wan)) as run:
        expected = read_all_positions(*run, epochs=5)
    with open_run(run_config, encoding_spec(*wan), until=30) as (corpus, encoded):
        order = corpus.order
        for positions in ([0, 7, 13, 25], [24, 29], [1, 12], [18]):  # also epochs that were released already
            draws = order.slice(0, 30).take(positions)
            micro = MicroBatch(order.groups[0].bucket, draws)
            for row, position in enumerate(positions):
                assert torch.equal(encoded.latents(micro)["latents"][row], expected[position][0]["latents"])
                assert torch.equal(encoded.texts(micro)[row]["embeds"], expected[position][1]["embeds"])


def test_a_resumed_run_encodes_only_the_rest_of_its_epoch(tmp_path: Path, wan) -> None:
    run_config = config(tmp_path, "refresh_each_epoch")
    with open_run(without_caches(run_config), encoding_spec(*wan)) as run:
        expected = read_all_positions(*run, epochs=2)
    family, count = with_counting_encoders(wan[0])
    with open_run(run_config, encoding_spec(family, wan[1]), begin=9, until=12) as (corpus, encoded):
        assert count.samples <= 2 + 3
        for micro in (batch for batch in batches(corpus) if int(batch.draws.position[0]) >= 9):
            for row, position in enumerate(micro.draws.position.tolist()):
                assert torch.equal(encoded.latents(micro)["latents"][row], expected[position][0]["latents"])


def test_closing_during_a_background_build_removes_the_unfinished_arena(tmp_path: Path, wan) -> None:
    with open_run(config(tmp_path, "refresh_each_epoch", count=12), encoding_spec(*wan)):
        pass
    assert cached(tmp_path / "ram") == []


class FakeEpoch:
    def __init__(self, epoch: int, closed: list[int]) -> None:
        self.epoch, self._closed = epoch, closed

    def close(self) -> None:
        self._closed.append(self.epoch)


def test_waiting_for_an_epoch_is_measured() -> None:
    sink, closed, release = RecordingSink(), [], threading.Event()

    def make(epoch: int, stop) -> FakeEpoch:
        if epoch == 1:
            release.wait(5)
        return FakeEpoch(epoch, closed)

    rotation = EpochRotation(make, epochs=3, sink=sink)
    assert rotation.get_epoch(0).epoch == 0
    threading.Timer(0.1, release.set).start()
    assert rotation.get_epoch(1).epoch == 1
    waited = [event.figures for event in sink.events if isinstance(event, MeasurementEvent)]
    assert waited[-1]["epoch"] == 1 and waited[-1]["seconds"] >= 0.05
    rotation.release_through(0)
    assert closed == [0] and rotation.get_epoch(0) is None
    assert rotation.get_epoch(2).epoch == 2
    rotation.close()
    assert sorted(closed) == [0, 1, 2]


def test_an_error_in_the_background_is_raised_by_get_epoch() -> None:
    def make(epoch: int, stop) -> FakeEpoch:
        if epoch == 1:
            raise CacheError("no room")
        return FakeEpoch(epoch, [])

    rotation = EpochRotation(make, epochs=None, sink=RecordingSink())
    rotation.get_epoch(0)
    with pytest.raises(CacheError, match="no room"):
        rotation.get_epoch(1)
    rotation.close()


def test_closing_stops_the_background_build() -> None:
    began = threading.Event()

    def make(epoch: int, stop) -> FakeEpoch:
        began.set()
        while epoch == 1 and not stop():
            time.sleep(0.01)
        return FakeEpoch(epoch, [])

    rotation = EpochRotation(make, epochs=None, sink=RecordingSink())
    rotation.get_epoch(0)
    began.wait()
    begin = time.monotonic()
    rotation.close()
    assert time.monotonic() - begin < 2
