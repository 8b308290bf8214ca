"""Eight concurrent threads on the overflow allocator, with sanitizers; tests/torture runs a million operations."""

from __future__ import annotations

import pytest

from tests.memory.sanitized import run_threads


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_eight_threads_have_no_data_race_and_leave_no_memory(sanitizer: str) -> None:
    output = run_threads(sanitizer, operations=16_000, timeout_s=120)
    assert output.rstrip().endswith("wrong 0: good")
    assert "(0 managed)" not in output, "the threads never reached managed memory"
