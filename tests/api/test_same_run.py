"""Settings that do not affect the training result may change between sessions of the same run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from supertuner.api.session import build_saved_config
from supertuner.config.sources.load import load_config
from supertuner.core.errors import RunFolderError
from supertuner.sinks.run_folder import RESOLVED_CONFIG_FILE, RUN_FILE, RunFolder
from tests.distributed.ranks import run_launched
from tests.distributed.runs import STEPS, a_run, run_folder, train

THREADS = ("loader.prefetch_batches=5", "loader.num_workers=1", "datasets[1].in_memory.num_workers=3")


def started_run(path: Path) -> Path:
    """The folder of a run that has trained already."""
    with RunFolder(run_folder(path), "run", build_saved_config(load_config(path))) as folder:
        (folder.path / "losses.jsonl").write_text("{}\n")
    return folder.path


@pytest.mark.parametrize("setting", THREADS)
def test_numbers_of_threads_and_prefetched_batches_may_change_and_the_change_is_reported(
    tmp_path: Path, setting: str
) -> None:
    path = a_run(tmp_path, "run", 1)
    before, after = build_saved_config(load_config(path)), build_saved_config(load_config(path, sets=[setting]))
    assert after.digest == before.digest
    with RunFolder(started_run(path), "run", after) as folder:
        assert [change.partition(":")[0] for change in folder.changed_settings] == [setting.partition("=")[0]]


def test_a_run_from_before_these_settings_existed_continues(tmp_path: Path) -> None:
    path = a_run(tmp_path, "run", 1)
    resolved = started_run(path) / RESOLVED_CONFIG_FILE
    stored: dict[str, Any] = json.loads(resolved.read_text())
    del stored["config"]["loader"]["prefetch_batches"], stored["config"]["datasets"][1]["in_memory"]
    resolved.write_text(json.dumps(stored))
    run = resolved.with_name(RUN_FILE)
    run.write_text(json.dumps({**json.loads(run.read_text()), "config_digest": "of an earlier version"}))
    with RunFolder(resolved.parent, "run", build_saved_config(load_config(path, sets=THREADS))) as folder:
        assert sorted(change.partition(":")[0] for change in folder.changed_settings) == sorted(
            setting.partition("=")[0] for setting in THREADS
        )


def test_a_setting_that_affects_the_order_of_samples_may_not_change(tmp_path: Path) -> None:
    path = a_run(tmp_path, "run", 1)
    folder = started_run(path)
    with pytest.raises(RunFolderError, match=r"loader\.drop_last: false there, true here"):
        RunFolder(folder, "run", build_saved_config(load_config(path, sets=["loader.drop_last=true"])))


def test_a_run_resumed_with_other_numbers_of_threads_has_the_same_losses(tmp_path: Path) -> None:
    whole, stopped = a_run(tmp_path, "whole", 1), a_run(tmp_path, "stopped", 1)
    run_launched(1, train, whole)
    assert run_launched(1, train, stopped, 0, 3, signal.SIGTERM)[0].step == 3
    tree = json.loads(stopped.read_text())
    tree["loader"] = {"prefetch_batches": 5, "num_workers": 1}
    tree["datasets"][0]["in_memory"] = {"num_workers": 3}
    stopped.write_text(json.dumps(tree))
    assert run_launched(1, train, stopped)[0].step == STEPS
    left, right = ((run_folder(path) / "losses.jsonl").read_bytes() for path in (whole, stopped))
    assert left == right
