"""Datasets are looked at without staging: counts, shapes and sizes are those that staging finds, or are unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.data.corpus_loader import open_corpus
from supertuner.optim.schedule import build_training_schedule
from supertuner.plan.forecast import survey as module
from supertuner.plan.forecast.dataset_sizes import bucket_draw_shares, forecast_schedule
from supertuner.plan.forecast.survey import survey_datasets
from supertuner.tools.sample_data import make_sample_data


def pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (number % 255, 0, 0)).save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(f"picture {number}")
    return folder


def configured(tmp_path: Path, dataset: dict[str, Any], **blocks: Any) -> Path:
    file = tmp_path / "run.json"
    given = {"arena": {"home": str(tmp_path / "arenas")}, "run": {"output_dir": str(tmp_path)}, "datasets": [dataset]}
    file.write_text(json.dumps({**given, **blocks}))
    return file


def test_what_is_seen_is_what_staging_finds(tmp_path: Path) -> None:
    sizes = [(64, 64)] * 5 + [(96, 48)] * 3 + [(48, 96)]
    data = {"instance_data_dir": str(pictures(tmp_path / "data", sizes)), "resolution": 64, "bucket_step": 16}
    train = {"batch_size": 2, "num_epochs": 3}
    config = load_config(configured(tmp_path, {**data, "repeats": 2}, train=train)).config
    (found,) = survey_datasets(config)
    with open_corpus(config, RunContext.silent(config.run.output_dir)) as corpus:
        groups = {group.bucket: len(group.sample_indices) for group in corpus.order.groups}
        real = build_training_schedule(config, corpus.order.epoch_begin, 1)
    assert {one.bucket: one.samples for one in found.bucket_counts} == groups
    assert found.samples == 9
    planned = forecast_schedule(config, [found])
    assert planned is not None and (planned.total_samples, planned.total_steps) == (
        real.total_samples,
        real.total_steps,
    )
    taken = sum(file.stat().st_blocks * 512 for file in (tmp_path / "arenas").rglob("*") if file.is_file())
    assert found.stored_bytes is not None and 0.5 < found.stored_bytes / taken < 2
    shares = bucket_draw_shares([found])
    assert sum(share for share in shares.values() if share is not None) == pytest.approx(1.0)


def test_pictures_clips_and_sounds_are_counted(tmp_path: Path) -> None:
    made = make_sample_data(tmp_path / "data", images=6, videos=2, sounds=2)
    found = survey_datasets(load_config(made.config).config)
    assert [one.samples for one in found] == [6, 2, 2]
    assert all(one.captions is not None and one.captions.total_bytes for one in found)


def test_of_many_files_some_are_read_and_stand_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "data", [(64, 64), (64, 64), (96, 48), (64, 64)] * 10)
    monkeypatch.setattr(module, "MOST_FILES", 10)
    data = {"instance_data_dir": str(folder), "resolution": 64, "bucket_step": 16}
    (found,) = survey_datasets(load_config(configured(tmp_path, data)).config)
    assert found.samples == 40
    assert "10 of them were looked at" in found.explanation


def test_a_dataset_that_is_elsewhere_is_as_large_as_is_said_or_unknown(tmp_path: Path) -> None:
    data = {"id": "cats", "instance_data_dir": "/nowhere/cats", "resolution": 1024}
    loaded = load_config(configured(tmp_path, data, train={"num_epochs": 2}), check_paths=False).config
    (unknown,) = survey_datasets(loaded)
    assert unknown.samples is None and unknown.stored_bytes is None and "say --samples N" in unknown.explanation
    assert forecast_schedule(loaded, [unknown]) is None
    (said,) = survey_datasets(loaded, samples=260)
    assert said.samples == 260
    planned = forecast_schedule(loaded, [said])
    assert planned is not None and planned.total_samples == 520
    assert said.bucket_counts[0].bucket.width * said.bucket_counts[0].bucket.height >= 1024 * 1024


def test_a_run_that_ends_by_steps_has_a_length_without_its_data(tmp_path: Path) -> None:
    data = {"id": "cats", "instance_data_dir": "/nowhere/cats", "resolution": 1024}
    train = {"max_steps": 50, "gradient_accumulation_steps": 4}
    config = load_config(configured(tmp_path, data, train=train), check_paths=False).config
    planned = forecast_schedule(config, survey_datasets(config))
    assert planned is not None and planned.total_samples == 200


def test_what_changes_from_turn_to_turn_is_cached_as_the_settings_say(tmp_path: Path) -> None:
    folder = str(pictures(tmp_path / "data", [(64, 64)] * 4))
    data = {"instance_data_dir": folder, "resolution": 64, "bucket_step": 16, "augment": {"flip": 0.5}}
    turns = {}
    for mode in ("static", "refresh_each_epoch", "disable_cache"):
        settings = {**data, "augmentations_cache_mode": mode, **({"variations": 3} if mode == "static" else {})}
        (found,) = survey_datasets(load_config(configured(tmp_path, settings)).config)
        turns[mode] = (found.cached_media_variants, found.cached_text_variants)
    assert turns == {"static": (3, 1), "refresh_each_epoch": (2, 1), "disable_cache": (0, 1)}


def test_a_broken_file_is_no_sample_and_no_error(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", [(64, 64)] * 3)
    (folder / "999.png").write_bytes(b"not a picture")
    (found,) = survey_datasets(
        load_config(configured(tmp_path, {"instance_data_dir": str(folder), "resolution": 64})).config
    )
    assert found.samples == 3
