"""Exports: all files or none, and a full disk is reported."""

from __future__ import annotations

import resource
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from supertuner.arena.run_context import RunContext
from supertuner.config.sources.load import load_config
from supertuner.core.errors import TrainError
from supertuner.train.export.export import RunExporter
from supertuner.train.setup import open_run
from tests.train.runs import config


@pytest.mark.parametrize("adapter", [{"type": "lora", "rank": 64}, {"type": "full"}], ids=["lora", "full"])
def test_an_export_to_a_full_disk_fails_and_keeps_earlier_ones(tmp_path: Path, adapter: dict[str, Any]) -> None:
    file = config(tmp_path, "a", adapter=adapter)
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    with open_run(load_config(file).config, RunContext.silent(folder)) as run:
        whole = {path: path.stat().st_size for path in RunExporter(run).finish()}
        before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        run.step = 1
        try:
            with pytest.raises(TrainError, match=r"step-00000001.* cannot be written: .*free some space"):
                RunExporter(run).finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
    assert {path: path.stat().st_size for path in whole} == whole
    assert [path.name for path in (folder / "exports").iterdir()] == ["step-00000000"]


def test_an_exported_file_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    file = config(tmp_path, "a", adapter={"rank": 1024}, model={"experts": "high_noise"}, train={"ema_decay": None})
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    with open_run(load_config(file).config, RunContext.silent(folder)) as run:
        RunExporter(run).finish()  # so that lazy imports are done
        run.step = 1
        tracemalloc.start()
        (made,) = RunExporter(run).finish()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert made.stat().st_size > 3e6 and peak < 1.5e6, "tensors themselves are not Python's memory"
