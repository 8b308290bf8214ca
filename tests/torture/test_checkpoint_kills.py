"""Every fault is injected at every system call of a save, including calls that change nothing on disk."""

import pytest

from tests.train.run_faults import run_saving_faults


@pytest.mark.torture
def test_every_fault_at_every_call_of_a_save_leaves_a_complete_checkpoint() -> None:
    seen = run_saving_faults("thorough")
    for found in seen.values():
        for how in ("killed before", "killed after"):
            assert sum(found["outcomes"][how].values()) == len(found["calls"])
