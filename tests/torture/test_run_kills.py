"""A run is killed and resumed a thousand times."""

from __future__ import annotations

import pytest

from tests.train.kills import check_same, killed_run, usual_seconds
from tests.train.runs import TrainingForkServer


@pytest.mark.torture
@pytest.mark.timeout(5400)
def test_a_run_killed_a_thousand_times_ends_with_the_same_bits(tmp_path):
    parent = TrainingForkServer(tmp_path / "parent.log")
    try:
        usual_s = usual_seconds(parent, tmp_path)
        killed_run(parent, tmp_path, "killed", 1000, seed=11, usual_s=usual_s)
        check_same(tmp_path, "killed")
    finally:
        parent.close()
