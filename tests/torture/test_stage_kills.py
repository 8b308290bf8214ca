"""A hundred stagers killed at random microseconds: the next start works, every time."""

import pytest

from tests.data.kills import kill_stagers
from tests.data.media_files import picture, write


@pytest.mark.torture
def test_a_hundred_killed_stagers_leave_nothing_in_the_way(tmp_path):
    folder = write(tmp_path / "set", {f"{i:04d}.jpg": picture("jpeg", (96, 96), seed=i) for i in range(400)})
    assert kill_stagers(folder, tmp_path / "home", times=100, seed=1) > 10
