"""A rank that waits for another one is not at fault, however it waits; a rank that works is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from supertuner.distributed.watchdog.liveness import COMPILER_FILES
from tests.distributed.ranks import RankOutcome, all_messages, launched_ranks, run_launched
from tests.distributed.waiting import one_compiles, one_waits, one_wants_an_epoch
from tests.train.encoding.encoding_helpers import config_of, pictures, tiny

SHORT_S = 4.0
"""Half of it is the stall timeout, which is shorter than the work in these tests takes."""


def test_the_files_of_the_compiler_exist() -> None:
    """torch.compile cannot be marked from outside: its frames are recognised by their files."""
    assert all(Path(file).is_file() for file in COMPILER_FILES)


@pytest.mark.parametrize("how", ["in a sum", "for weights", "for gradients"])
def test_the_hanging_rank_is_named_and_not_the_one_that_waits_for_it(tmp_path, how):
    with launched_ranks(2, one_waits, tmp_path, how, SHORT_S) as ranks:
        verdict = _verdict(tmp_path, ranks.ended())
    assert "rank 1 (" in verdict and "hangs: no sign of life" in verdict


@pytest.mark.parametrize("then", ["hangs", "works"])
def test_a_rank_that_waits_for_the_next_epoch_is_not_at_fault(tmp_path, then):
    """Nor is the rank that makes the epoch while it works, though its main thread waits for the other one in the middle
    of a window."""
    model = Path(tiny("wan2.2", tmp_path / "model")[1].source.path)
    varying = {"augment": {"flip": 0.5}, "augmentations_cache_mode": "refresh_each_epoch"}
    config = config_of(tmp_path, {"instance_data_dir": pictures(tmp_path / "images", 8), **varying})
    with launched_ranks(2, one_wants_an_epoch, tmp_path, config, model, then, SHORT_S) as ranks:
        outcomes = ranks.ended()
    if then == "works":
        assert [outcome.value for outcome in outcomes] == ["trained"] * 2, [one.error for one in outcomes]
        return
    verdict = _verdict(tmp_path, outcomes)
    assert "rank 1 (" in verdict
    assert "at supertuner/" in verdict, "where the thread is that makes the epoch"


def test_compiling_in_the_middle_of_a_run_is_no_hang(tmp_path):
    assert run_launched(2, one_compiles, tmp_path, SHORT_S) == ["trained"] * 2


def _verdict(logs: Path, outcomes: list[RankOutcome]) -> str:
    """The one message about the rank at fault."""
    (verdict,) = [line for line in all_messages(logs, outcomes).splitlines() if "ends with it" in line]
    return verdict
