"""The survey of datasets without staging finds the counts, shapes and sizes that staging finds, or reports them
unknown."""

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


def write_images(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size, (number % 255, 0, 0)).save(folder / f"{number:03d}.png")
        (folder / f"{number:03d}.txt").write_text(f"image {number}")
    return folder


def configured(tmp_path: Path, dataset: dict[str, Any], **blocks: Any) -> Path:
    file = tmp_path / "run.json"
    common = {"arena": {"home": str(tmp_path / "arenas")}, "run": {"output_dir": str(tmp_path)}, "datasets": [dataset]}
    file.write_text(json.dumps({**common, **blocks}))
    return file


def test_the_survey_finds_the_buckets_and_steps_that_staging_finds(tmp_path: Path) -> None:
    sizes = [(64, 64)] * 5 + [(96, 48)] * 3 + [(48, 96)]
    data = {"instance_data_dir": str(write_images(tmp_path / "data", sizes)), "resolution": 64, "bucket_step": 16}
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
    staged_bytes = sum(file.stat().st_blocks * 512 for file in (tmp_path / "arenas").rglob("*") if file.is_file())
    assert found.stored_bytes is not None and 0.5 < found.stored_bytes / staged_bytes < 2
    shares = bucket_draw_shares([found])
    assert sum(share for share in shares.values() if share is not None) == pytest.approx(1.0)


def test_images_videos_and_sounds_are_counted(tmp_path: Path) -> None:
    sample_data = make_sample_data(tmp_path / "data", images=6, videos=2, sounds=2)
    found = survey_datasets(load_config(sample_data.config).config)
    assert [one.samples for one in found] == [6, 2, 2]
    assert all(one.captions is not None and one.captions.total_bytes for one in found)


def test_of_many_files_a_sample_is_read_and_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path / "data", [(64, 64), (64, 64), (96, 48), (64, 64)] * 10)
    monkeypatch.setattr(module, "MAX_FILES_READ", 10)
    data = {"instance_data_dir": str(folder), "resolution": 64, "bucket_step": 16}
    (found,) = survey_datasets(load_config(configured(tmp_path, data)).config)
    assert found.samples == 40
    assert "10 of them were read" in found.explanation


def test_the_size_of_a_dataset_that_is_not_here_is_given_by_the_user_or_unknown(tmp_path: Path) -> None:
    data = {"id": "cats", "instance_data_dir": "/nowhere/cats", "resolution": 1024}
    loaded = load_config(configured(tmp_path, data, train={"num_epochs": 2}), check_paths=False).config
    (unknown,) = survey_datasets(loaded)
    assert unknown.samples is None and unknown.stored_bytes is None and "--samples N" in unknown.explanation
    assert forecast_schedule(loaded, [unknown]) is None
    (assumed,) = survey_datasets(loaded, samples=260)
    assert assumed.samples == 260
    planned = forecast_schedule(loaded, [assumed])
    assert planned is not None and planned.total_samples == 520
    assert assumed.bucket_counts[0].bucket.width * assumed.bucket_counts[0].bucket.height >= 1024 * 1024


def test_a_run_with_max_steps_has_a_known_length_without_its_data(tmp_path: Path) -> None:
    data = {"id": "cats", "instance_data_dir": "/nowhere/cats", "resolution": 1024}
    train = {"max_steps": 50, "gradient_accumulation_steps": 4}
    config = load_config(configured(tmp_path, data, train=train), check_paths=False).config
    planned = forecast_schedule(config, survey_datasets(config))
    assert planned is not None and planned.total_samples == 200


def test_cached_variants_follow_the_cache_mode(tmp_path: Path) -> None:
    folder = str(write_images(tmp_path / "data", [(64, 64)] * 4))
    data = {"instance_data_dir": folder, "resolution": 64, "bucket_step": 16, "augment": {"flip": 0.5}}
    variants = {}
    for mode in ("static", "refresh_each_epoch", "disable_cache"):
        settings = {**data, "augmentations_cache_mode": mode, **({"variations": 3} if mode == "static" else {})}
        (found,) = survey_datasets(load_config(configured(tmp_path, settings)).config)
        variants[mode] = (found.cached_media_variants, found.cached_text_variants)
    assert variants == {"static": (3, 1), "refresh_each_epoch": (2, 1), "disable_cache": (0, 1)}


def test_a_broken_file_is_skipped(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "data", [(64, 64)] * 3)
    (folder / "999.png").write_bytes(b"not an image")
    (found,) = survey_datasets(
        load_config(configured(tmp_path, {"instance_data_dir": str(folder), "resolution": 64})).config
    )
    assert found.samples == 3
