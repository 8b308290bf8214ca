"""Samples that change from turn to turn, and caches: kept in variations, made anew each epoch, or not cached at all."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from supertuner.cache.epoch_rotation import EpochRotation
from supertuner.core.errors import CacheError
from supertuner.core.events import MeasurementEvent
from supertuner.data.ordering.micro_batches import MicroBatch
from tests.cache.encoding import (
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
from tests.data.staging import RecordingSink

VARYING = {"augment": {"flip": 0.5, "brightness": 0.4}, "captions": {"shuffle_tags": True, "dropout": 0.2}}


def config(tmp_path: Path, mode: str | None, count: int = 4, cache: dict | None = None, **more):
    """One dataset that changes and one that does not, in one bucket."""
    changing = {"instance_data_dir": pictures(tmp_path / "images", count), **VARYING, **more}
    if mode is not None:
        changing["augmentations_cache_mode"] = mode
    return config_of(tmp_path, changing, {"instance_data_dir": pictures(tmp_path / "plain", 2)}, cache=cache)


def cached(folder: Path) -> list[str]:
    return [name for name in arenas(folder) if name.startswith(("latents", "text"))]


def test_without_a_mode_static_applies_and_is_told(tmp_path: Path, wan) -> None:
    told = RecordingSink()
    with open_run(config(tmp_path, None), encoding_spec(*wan), told) as run:
        unsaid = read_all_positions(*run)
    with open_run(config(tmp_path, "static"), encoding_spec(*wan)) as run:
        assert equal(read_all_positions(*run), unsaid)
    warning = told.warnings()
    assert "datasets[set0].augmentations_cache_mode" in warning and '"static" applies' in warning
    assert "augment.flip, augment.brightness, captions.shuffle_tags" in warning
    assert "set1" not in warning


def test_a_mode_that_has_nothing_to_do_is_told(tmp_path: Path, wan) -> None:
    told = RecordingSink()
    plain = {"instance_data_dir": pictures(tmp_path / "images", 2), "augmentations_cache_mode": "static"}
    with open_run(config_of(tmp_path, plain), encoding_spec(*wan), told):
        assert "has no effect" in told.warnings()


def test_static_uses_turn_t_of_each_sample_again_in_turn_t_plus_n(tmp_path: Path, wan) -> None:
    family, count = with_counting_encoders(wan[0])
    given = config(tmp_path, "static", variations=2)
    with open_run(without_caches(given), encoding_spec(*wan)) as (corpus, encoded):
        law = by_sample(corpus, encoded, epochs=2)
    with open_run(given, encoding_spec(family, wan[1])) as (corpus, encoded):
        made = count.samples
        found = by_sample(corpus, encoded, epochs=6)
        assert count.samples == made <= 4 * 2 + 2, "nothing is encoded while training"
    for (dataset, sample, turn), latents in found.items():
        assert torch.equal(latents, law[dataset, sample, turn % 2])


def by_sample(corpus, encoded, epochs: int) -> dict[tuple[int, int, int], torch.Tensor]:
    found = {}
    for micro in batches(corpus, epochs):
        latents, draws = encoded.latents(micro)["latents"], micro.draws
        for row, one in enumerate(latents):
            dataset = corpus.order.groups[int(draws.group[row])].dataset
            found[dataset, int(draws.sample[row]), int(draws.cycle[row])] = one.clone()
    return found


def test_static_keeps_the_choice_and_the_dropping_of_captions_free(tmp_path: Path, wan) -> None:
    """Only the order of tags is kept: a caption that is dropped in one turn is there in another."""
    given = config(tmp_path, "static")
    lengths: dict[int, set[int]] = {}
    with open_run(given, encoding_spec(*wan)) as (corpus, encoded):
        for micro in batches(corpus, epochs=12):
            for row, text in enumerate(encoded.texts(micro)):
                if corpus.order.groups[int(micro.draws.group[row])].dataset_index == 0:
                    lengths.setdefault(int(micro.draws.sample[row]), set()).add(len(text["embeds"]))
    assert any(len(one) > 1 for one in lengths.values())


def test_disable_cache_encodes_at_use_and_caches_the_other_datasets(tmp_path: Path, wan) -> None:
    family, count = with_counting_encoders(wan[0])
    given = config(tmp_path, "disable_cache")
    with open_run(without_caches(given), encoding_spec(*wan)) as run:
        law = read_all_positions(*run)
    with open_run(given, encoding_spec(family, wan[1])) as run:
        assert count.samples == 2, "the two pictures that never change"
        assert equal(read_all_positions(*run), law)
        assert count.samples == 2 + 2 * 4


@pytest.mark.parametrize("kind", ["unified_memory", "disk"])
def test_refresh_gives_each_epoch_its_own_entries_and_the_bits_of_encoding_at_use(
    tmp_path: Path, wan, kind: str
) -> None:
    cache = {"vae_cache_type": kind, "text_cache_type": kind, "persistent_cache": True}
    given = config(tmp_path, "refresh_each_epoch", cache=cache)
    with open_run(without_caches(given), encoding_spec(*wan)) as run:
        law = read_all_positions(*run, epochs=4)
    with open_run(given, encoding_spec(*wan), until=24) as run:
        assert equal(read_all_positions(*run, epochs=4), law)
    persistent, ram = cached(tmp_path / "runs" / "cache"), cached(tmp_path / "ram")
    assert not any("epoch" in name for name in persistent + ram), "an epoch's entries go with it"
    assert len(persistent) == 2, "what does not change is kept"


def test_an_epoch_s_entries_are_made_in_the_background_and_removed_when_it_is_over(tmp_path: Path, wan) -> None:
    given = config(tmp_path, "refresh_each_epoch")
    told = RecordingSink()
    with open_run(given, encoding_spec(*wan), told, until=24) as (corpus, encoded):
        plain = {name for name in cached(tmp_path / "ram") if "epoch" not in name}
        seen = []
        for micro in batches(corpus, epochs=4):
            encoded.latents(micro)
            encoded.texts(micro)
            names = set(cached(tmp_path / "ram"))
            assert plain <= names, "no other dataset's entries are touched"
            seen.append({name.split("-epoch")[1].split("-")[0] for name in names - plain})
        assert "0" in seen[0] and "0" not in seen[-1] and "1" not in seen[-1]
    made = [
        event.figures["epoch"]
        for event in told.events
        if isinstance(event, MeasurementEvent) and event.what == "cache.epoch"
    ]
    assert made == [0, 1, 2, 3]


def test_a_window_across_many_epochs_in_any_order_gets_the_same_bits(tmp_path: Path, wan) -> None:
    given = config(tmp_path, "refresh_each_epoch")
    with open_run(without_caches(given), encoding_spec(*wan)) as run:
        law = read_all_positions(*run, epochs=5)
    with open_run(given, encoding_spec(*wan), until=30) as (corpus, encoded):
        order = corpus.order
        for positions in ([0, 7, 13, 25], [24, 29], [1, 12], [18]):  # back to epochs that were given up
            draws = order.slice(0, 30).take(positions)
            micro = MicroBatch(order.groups[0].bucket, draws)
            for row, position in enumerate(positions):
                assert torch.equal(encoded.latents(micro)["latents"][row], law[position][0]["latents"])
                assert torch.equal(encoded.texts(micro)[row]["embeds"], law[position][1]["embeds"])


def test_a_run_that_goes_on_in_the_middle_makes_only_the_rest_of_the_epoch(tmp_path: Path, wan) -> None:
    given = config(tmp_path, "refresh_each_epoch")
    with open_run(without_caches(given), encoding_spec(*wan)) as run:
        law = read_all_positions(*run, epochs=2)
    family, count = with_counting_encoders(wan[0])
    with open_run(given, encoding_spec(family, wan[1]), begin=9, until=12) as (corpus, encoded):
        assert count.samples <= 2 + 3
        for micro in (one for one in batches(corpus) if int(one.draws.position[0]) >= 9):
            for row, position in enumerate(micro.draws.position.tolist()):
                assert torch.equal(encoded.latents(micro)["latents"][row], law[position][0]["latents"])


def test_leaving_in_the_middle_of_a_background_build_leaves_nothing(tmp_path: Path, wan) -> None:
    with open_run(config(tmp_path, "refresh_each_epoch", count=12), encoding_spec(*wan)):
        pass
    assert cached(tmp_path / "ram") == []


class FakeEpoch:
    def __init__(self, epoch: int, gone: list[int]) -> None:
        self.epoch, self._gone = epoch, gone

    def close(self) -> None:
        self._gone.append(self.epoch)


def test_a_trainer_that_is_faster_waits_and_is_told_how_long() -> None:
    told, gone, release = RecordingSink(), [], threading.Event()

    def make(epoch: int, stop) -> FakeEpoch:
        if epoch == 1:
            release.wait(5)
        return FakeEpoch(epoch, gone)

    rotation = EpochRotation(make, epochs=3, sink=told)
    assert rotation.get_epoch(0).epoch == 0
    threading.Timer(0.1, release.set).start()
    assert rotation.get_epoch(1).epoch == 1
    waited = [event.figures for event in told.events if isinstance(event, MeasurementEvent)]
    assert waited[-1]["epoch"] == 1 and waited[-1]["seconds"] >= 0.05
    rotation.release_through(0)
    assert gone == [0] and rotation.get_epoch(0) is None
    assert rotation.get_epoch(2).epoch == 2
    rotation.close()
    assert sorted(gone) == [0, 1, 2]


def test_an_error_in_the_background_is_raised_where_the_epoch_is_asked_for() -> None:
    def make(epoch: int, stop) -> FakeEpoch:
        if epoch == 1:
            raise CacheError("no room")
        return FakeEpoch(epoch, [])

    rotation = EpochRotation(make, epochs=None, sink=RecordingSink())
    rotation.get_epoch(0)
    with pytest.raises(CacheError, match="no room"):
        rotation.get_epoch(1)
    rotation.close()


def test_closing_stops_what_is_being_made() -> None:
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
