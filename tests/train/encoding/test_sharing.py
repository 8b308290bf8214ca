"""Encoders that are gone when they are done, and processes that share what one of them encodes."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import weakref
from pathlib import Path

import pytest

from supertuner.config.settings.run_config import RunConfig
from tests.cache.encoding import (
    config_of,
    encoding_spec,
    open_run,
    pictures,
    read_all_positions,
    tiny,
    with_counting_encoders,
)
from tests.children import begin, ended


def watched(family):
    """The family, and weak references to the encoders that it made."""
    alive: dict[str, weakref.ref] = {}

    def watch(name: str, make):
        def made(*of):
            encoder = make(*of)
            alive[name] = weakref.ref(encoder)
            return encoder

        return made

    replaced = dataclasses.replace(
        family,
        media_encoder=watch("media", family.media_encoder),
        text_encoder=watch("text", family.text_encoder),
    )
    return replaced, alive


@pytest.mark.parametrize("mode", [None, "refresh_each_epoch", "disable_cache"])
def test_encoders_are_freed_when_nothing_is_left_to_encode_and_kept_where_something_is(
    tmp_path: Path, wan, mode: str | None
) -> None:
    changing = {"augment": {"flip": 0.5}, "augmentations_cache_mode": mode} if mode else {}
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 3), **changing})
    family, alive = watched(wan[0])
    with open_run(config, encoding_spec(family, wan[1])) as run:
        gc.collect()
        assert alive["text"]() is None
        read_all_positions(*run)
        assert (alive["media"]() is not None) == bool(mode)
    gc.collect()
    assert alive["media"]() is None


def start(config: RunConfig, model: Path, told: Path) -> None:
    """Train on everything, and write down how many samples were encoded here."""
    family, read = tiny("wan2.2", model)
    family, count = with_counting_encoders(family)
    with open_run(config, encoding_spec(family, read)) as run:
        assert len(read_all_positions(*run)) == 16
        (told / f"encoded-{os.getpid()}").write_text(str(count.samples))
        while len(list(told.glob("encoded-*"))) < 3:  # nobody leaves before all have come
            time.sleep(0.01)


def test_of_several_processes_one_encodes_and_all_train(tmp_path: Path, wan) -> None:
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 8)})
    children = [begin(start, config, Path(wan[1].source.path), tmp_path) for _ in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    encoded = sorted(int(file.read_text()) for file in tmp_path.glob("encoded-*"))
    assert encoded == [0, 0, 8]
