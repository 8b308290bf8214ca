"""Encoders are released when nothing is left to encode, and processes of one node share encoded samples."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import weakref
from pathlib import Path

import pytest

from supertuner.config.settings.run_config import RunConfig
from tests.children import begin, ended
from tests.train.encoding.encoding_helpers import (
    config_of,
    encoding_spec,
    open_run,
    pictures,
    read_all_positions,
    tiny,
    with_counting_encoders,
)


def with_weak_references(family):
    """The family, and weak references to the encoders that it builds."""
    alive: dict[str, weakref.ref] = {}

    def watch(name: str, build):
        def build_and_remember(*args):
            encoder = build(*args)
            alive[name] = weakref.ref(encoder)
            return encoder

        return build_and_remember

    replaced = dataclasses.replace(
        family,
        build_media_encoder=watch("media", family.build_media_encoder),
        build_text_encoder=watch("text", family.build_text_encoder),
    )
    return replaced, alive


@pytest.mark.parametrize("mode", [None, "refresh_each_epoch", "disable_cache"])
def test_encoders_are_released_unless_training_needs_them(tmp_path: Path, wan, mode: str | None) -> None:
    changing = {"augment": {"flip": 0.5}, "augmentations_cache_mode": mode} if mode else {}
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 3), **changing})
    family, alive = with_weak_references(wan[0])
    with open_run(config, encoding_spec(family, wan[1])) as run:
        gc.collect()
        assert alive["text"]() is None
        read_all_positions(*run)
        assert (alive["media"]() is not None) == bool(mode)
    gc.collect()
    assert alive["media"]() is None


def start(config: RunConfig, model_folder: Path, results: Path) -> None:
    """Read all batches, and write how many samples this process encoded."""
    family, model = tiny("wan2.2", model_folder)
    family, count = with_counting_encoders(family)
    with open_run(config, encoding_spec(family, model)) as run:
        assert len(read_all_positions(*run)) == 16
        (results / f"encoded-{os.getpid()}").write_text(str(count.samples))
        while len(list(results.glob("encoded-*"))) < 3:  # no process leaves before all have opened the cache
            time.sleep(0.01)


def test_one_of_several_processes_encodes_and_all_read(tmp_path: Path, wan) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 8)})
    children = [begin(start, config, Path(wan[1].source.path), tmp_path) for _ in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    encoded = sorted(int(file.read_text()) for file in tmp_path.glob("encoded-*"))
    assert encoded == [0, 0, 8]
