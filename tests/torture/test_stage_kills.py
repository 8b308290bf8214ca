"""Staging works after each of a hundred stagers that were killed at random times."""

import pytest

from tests.data.kills import kill_stagers
from tests.data.media_files import picture, write


@pytest.mark.torture
def test_staging_works_after_a_hundred_killed_stagers(tmp_path):
    folder = write(tmp_path / "set", {f"{i:04d}.jpg": picture("jpeg", (96, 96), seed=i) for i in range(400)})
    assert kill_stagers(folder, tmp_path / "home", times=100, seed=1) > 10
