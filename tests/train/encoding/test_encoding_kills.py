"""Runs killed while they encode with a real encoder: the next one continues and gives the same bits."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from supertuner.config.settings.run_config import RunConfig
from tests.children import begin, ended, kill
from tests.train.encoding.encoding_helpers import (
    arenas,
    config_of,
    encoding_spec,
    equal,
    open_run,
    pictures,
    read_all_positions,
    tiny,
    with_counting_encoders,
)


def start(config: RunConfig, model: Path) -> None:
    with open_run(config, encoding_spec(*tiny("wan2.2", model)), until=20):
        pass


@pytest.mark.parametrize("mode", [None, "refresh_each_epoch"])
def test_a_run_after_killed_ones_gives_the_same_bits(tmp_path: Path, wan, mode: str | None) -> None:
    changing = {"augment": {"flip": 0.5}, "augmentations_cache_mode": mode} if mode else {}
    config = config_of(
        tmp_path,
        {"instance_data_dir": pictures(tmp_path / "images", 10), **changing},
        {"instance_data_dir": pictures(tmp_path / "more", 4)},
    )
    encoding = encoding_spec(*wan)
    with open_run(config, encoding, until=20) as run:
        expected = read_all_positions(*run)
    rng, died, model = random.Random(3), 0, Path(wan[1].source.path)

    assert ended(begin(start, config, model)) == 0  # the first one also starts the fork server
    began = time.perf_counter()
    assert ended(begin(start, config, model)) == 0
    usual_s = time.perf_counter() - began
    while died < 6:
        child = begin(start, config, model)
        time.sleep(rng.uniform(0, usual_s))
        died += kill(child) == -signal.SIGKILL
    family, count = with_counting_encoders(wan[0])
    with open_run(config, encoding_spec(family, wan[1]), until=20) as run:
        assert equal(read_all_positions(*run), expected)
    assert count.samples <= 10 + 10 + 4
    leftovers = [name for name in arenas(tmp_path / "ram") if name.startswith(("latents", "text"))]
    assert leftovers == [], "unfinished arenas of killed runs are finished or removed"
