"""The first command that a newcomer runs."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from supertuner.arena.home import Home
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import MediaKind
from supertuner.tools.quickstart import quickstart


def test_quickstart_stages_every_kind_and_draws_every_bucket(tmp_path: Path) -> None:
    made = quickstart(tmp_path / "quickstart")
    assert {result.kind for result in made.staged} == set(MediaKind)
    assert all(result.files and not result.set_aside for result in made.staged)
    assert made.buckets >= 8
    with Image.open(made.sheet) as sheet:
        assert sheet.format == "PNG"
        assert len(np.unique(np.asarray(sheet.convert("RGB")).reshape(-1, 3), axis=0)) > 100
    _forget(made)


def test_a_second_quickstart_reuses_what_is_staged_and_draws_the_same_picture(tmp_path: Path) -> None:
    first = quickstart(tmp_path / "quickstart")
    picture = first.sheet.read_bytes()
    second = quickstart(tmp_path / "quickstart")
    assert all(result.reused for result in second.staged)
    assert second.sheet.read_bytes() == picture
    _forget(second)


def test_quickstart_leaves_files_of_yours_alone(tmp_path: Path) -> None:
    mine = tmp_path / "quickstart" / "data" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(SuperTunerError, match="holds files of yours"):
        quickstart(tmp_path / "quickstart")
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


def test_quickstart_begins_again_after_it_was_killed_while_drawing(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from supertuner.tools.quickstart import quickstart as q; q(pathlib.Path(sys.argv[1]))"
    )
    folder = tmp_path / "quickstart"
    child = subprocess.Popen([sys.executable, "-c", script, str(folder)], stderr=subprocess.DEVNULL)
    while not list(folder.glob(".making-*/data/images/*")) and child.poll() is None:
        time.sleep(0.001)
    child.kill()
    child.wait()
    assert not (folder / "data").exists()
    made = quickstart(folder)
    assert made.sheet.is_file()
    _forget(made)


def _forget(made) -> None:  # type: ignore[no-untyped-def]
    """Quickstart stages into the node's shared memory, as a user's run does; a test takes its arenas away again."""
    for result in made.staged:
        home = Home(Path(result.home))
        for info in home.ls():
            if info.name.startswith(result.arena):
                home.remove(info.name)
