"""Eight threads at once on the overflow allocator, under sanitizers; the million operations are in tests/torture."""

from __future__ import annotations

import pytest

from tests.memory.sanitized import run_threads


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_eight_threads_race_nowhere_and_leave_nothing(sanitizer: str) -> None:
    said = run_threads(sanitizer, operations=16_000, timeout_s=120)
    assert said.rstrip().endswith("wrong 0: good")
    assert "(0 managed)" not in said, "the threads never got as far as managed memory"
