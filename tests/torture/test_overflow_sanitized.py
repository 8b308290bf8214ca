"""A million operations of eight threads on the overflow allocator under ThreadSanitizer and AddressSanitizer."""

from __future__ import annotations

import pytest

from tests.memory.sanitized import run_threads

pytestmark = pytest.mark.torture


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_million_operations_of_eight_threads_have_no_race_and_no_memory_error(sanitizer: str) -> None:
    assert run_threads(sanitizer, operations=1_000_000, timeout_s=1700).rstrip().endswith("wrong 0: good")
