"""The contact sheet shows batches of the training order for every kind of media; the sample data are reproducible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import MediaKind
from supertuner.data.corpus_loader import open_corpus
from supertuner.sinks.drawing import wrap_text
from supertuner.tools.contact_sheet import ContactSheetCell, ContactSheetSection, render_contact_sheet
from supertuner.tools.preview import first_batch_per_bucket, preview_dataset, write_preview
from supertuner.tools.sample_data import make_sample_data


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    return make_sample_data(folder, images=10, videos=4, sounds=4).config


def opened(config: Path, *sets: str):
    loaded = load_config(config, sets=[f"arena.home={config.parent / 'arenas'}", *sets])
    return open_corpus(loaded.config, RunContext.silent(loaded.config.run.output_dir))


def test_sample_data_have_captions_and_every_kind_of_media_and_depend_only_on_the_seed(sample, tmp_path):
    files = {path.suffix for path in sample.parent.rglob("*.*")}
    assert {".jpg", ".png", ".webp", ".mp4", ".wav", ".flac", ".txt"} <= files
    again = make_sample_data(tmp_path / "again", images=10, videos=0, sounds=0).config.parent
    other = make_sample_data(tmp_path / "other", images=10, videos=0, sounds=0, seed=1).config.parent
    picture = [(folder / "images/001.png").read_bytes() for folder in (sample.parent, again, other)]
    assert picture[0] == picture[1] != picture[2]
    with opened(sample) as corpus:
        for part in corpus.datasets:
            assert len(part.samples) and all(part.samples.captions(i) for i in range(len(part.samples)))


def test_every_bucket_has_its_first_batch_of_the_epoch(sample):
    with opened(sample) as corpus:
        for epoch in (0, 3):
            batches = first_batch_per_bucket(corpus, epoch)
            assert {batch.bucket.kind for batch in batches} == set(MediaKind)
            groups = [int(batch.draws.group[0]) for batch in batches]
            assert groups == list(range(len(corpus.order.groups)))
            for batch in batches:
                assert set(batch.draws.epoch.tolist()) == {epoch}
                again = next(corpus.order.batches(int(batch.draws.position[0])))
                assert batch.draws.position.tolist() == again.position.tolist()


def test_the_sheet_is_a_png_that_depends_only_on_the_epoch(sample, tmp_path):
    sheets = []
    for name, epoch in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / f"{name}.png"
        with opened(sample) as corpus:
            assert write_preview(corpus, out, epoch=epoch, threads=2) == len(corpus.order.groups)
        sheets.append(out.read_bytes())
    assert sheets[0] == sheets[1] != sheets[2]
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.width == 1600 and sheet.height > 1000


def test_a_dataset_without_samples_in_an_epoch_is_not_on_its_sheet(sample):
    with opened(sample, "datasets[1].weight=0.1") as corpus:
        kinds = [{batch.bucket.kind for batch in first_batch_per_bucket(corpus, epoch)} for epoch in range(20)]
    assert any(MediaKind.VIDEO not in found for found in kinds) and any(MediaKind.VIDEO in found for found in kinds)


def test_images_videos_and_audio_are_drawn():
    red = np.zeros((3, 64, 64), np.uint8)
    red[0] = 255
    clip = np.repeat(red[:, None], 30, axis=1)
    wave = np.sin(np.linspace(0, 300, 8000, dtype=np.float32))[None]
    cells = (
        ContactSheetCell(red, "a red square", "a"),
        ContactSheetCell(clip, "", "b"),
        ContactSheetCell(wave, "a tone", "c", 0.5),
    )
    sheet = np.asarray(render_contact_sheet("title", "note", [ContactSheetSection("bucket 64×64", "two", cells)]))
    assert (sheet == (255, 0, 0)).all(axis=2).sum() > 210 * 210
    assert (sheet == (0x2F, 0x6F, 0xB3)).all(axis=2).sum() > 1000


def test_long_captions_are_truncated_with_an_ellipsis_and_short_ones_are_not():
    assert wrap_text("a cat", 200, 3) == ["a cat"]
    lines = wrap_text("word " * 200, 200, 3)
    assert len(lines) == 3 and lines[-1].endswith("…")
    assert wrap_text("x" * 500, 200, 1)[0].endswith("…")


def test_the_commands_sample_data_and_preview_work_together(tmp_path):
    def supertuner(*arguments: str) -> str:
        code = "from supertuner.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    data, sheet = tmp_path / "data", tmp_path / "sheet.png"
    supertuner("sample-data", str(data), "--images", "4", "--videos", "2", "--sounds", "2")
    assert json.loads((data / "config.json").read_text())["train"] == {"batch_size": 4}
    output = supertuner(
        "preview", str(data / "config.json"), "--out", str(sheet), "--set", f"arena.home={tmp_path / 'a'}"
    )
    with Image.open(sheet) as picture:
        assert picture.format == "PNG"
    assert "bucket" in output
    rare = [argument for place in range(3) for argument in ("--set", f"datasets[{place}].weight=0.000001")]
    output = supertuner(
        "preview", str(data / "config.json"), "--out", str(sheet), "--set", f"arena.home={tmp_path / 'a'}", *rare
    )
    assert "0 buckets; epoch 0 has no samples" in output


@pytest.mark.parametrize("out", ["sheet.jpg", "nowhere/sheet.png", "folder.png"])
def test_a_sheet_that_cannot_be_written_is_refused_before_anything_is_staged(sample, tmp_path, out):
    (tmp_path / "folder.png").mkdir()
    loaded = load_config(sample, sets=[f"arena.home={tmp_path / 'arenas'}"])
    with pytest.raises(SuperTunerError, match="--out"):
        preview_dataset(loaded, tmp_path / out)
    assert not (tmp_path / "arenas").exists()
