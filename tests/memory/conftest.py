"""Fixtures of the memory tests: processes that run on the fake driver, ended with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.memory.on_fake import FakeProcessPool


@pytest.fixture(scope="session")
def fakes() -> Iterator[FakeProcessPool]:
    pool = FakeProcessPool()
    yield pool
    pool.close()
