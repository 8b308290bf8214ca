"""Every fault at every call of a save, those that change nothing on disk included."""

import pytest

from tests.train.run_faults import run_saving_faults


@pytest.mark.torture
def test_every_fault_at_every_call_of_a_save_leaves_a_whole_checkpoint() -> None:
    seen = run_saving_faults("thorough")
    for found in seen.values():
        for how in ("killed before", "killed after"):
            assert sum(found["outcomes"][how].values()) == len(found["calls"])
