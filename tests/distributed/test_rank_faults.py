"""A rank that is killed or stopped under torchrun is named by one survivor of its node; `make torture` has more."""

from __future__ import annotations

import signal

import pytest

from tests.distributed.fault_points import IN_BACKWARD, IN_WAIT
from tests.distributed.torchrun_faults import check_report, run_with_fault


@pytest.mark.parametrize(
    ("ranks", "rank", "place", "sent"),
    [
        (2, 1, IN_BACKWARD, signal.SIGKILL),
        (2, 0, "before control values", signal.SIGKILL),
        (4, 3, "before the optimizer step", signal.SIGKILL),
        (2, 1, "before the end", signal.SIGKILL),
        (3, 0, "before the gradient norm", signal.SIGKILL),
        (2, 1, "before the process group is left", signal.SIGKILL),
        (2, 0, "before a bucket is sent", signal.SIGSTOP),
        (3, 1, IN_WAIT, signal.SIGSTOP),
        (4, 2, "before a forward pass", signal.SIGSTOP),
        (2, 1, "before the optimizer step", signal.SIGSTOP),
    ],
)
def test_a_rank_killed_or_stopped_in_a_window_is_named(tmp_path, ranks, rank, place, sent):
    check_report(run_with_fault(tmp_path, ranks, place, rank, sent), rank, sent)
