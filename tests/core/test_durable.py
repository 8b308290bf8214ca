"""A durably written file is complete at any moment, even if its writer is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supertuner.core import durable
from tests.ctrl_c import ctrl_c_at, return_from

WRITE_FOREVER = """
import sys
from pathlib import Path
from supertuner.core import durable
from tests.ctrl_c import ctrl_c_at, return_from
path = Path(sys.argv[1])
for turn in range(10**9):
    durable.write_bytes(path, bytes([turn % 256]) * 300_000)
    if turn == 0:
        sys.stdout.write("begun\\n"); sys.stdout.flush()
"""


def test_a_file_is_replaced_and_no_temporary_file_remains(tmp_path: Path) -> None:
    durable.write_text(tmp_path / "a.txt", "old")
    durable.write_text(tmp_path / "a.txt", "new ✓")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "new ✓"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_writer_killed_at_any_moment_leaves_a_complete_file(tmp_path: Path) -> None:
    path, rng = tmp_path / "state.bin", random.Random(0)
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        time.sleep(rng.uniform(0, 0.01))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        content = path.read_bytes()
        assert len(content) == 300_000 and len(set(content)) == 1


def test_a_failed_write_keeps_the_old_file_and_no_temporary_file_remains(tmp_path: Path) -> None:
    durable.write_json(tmp_path / "a.json", {"n": 1})
    with pytest.raises(ValueError):
        durable.write_json(tmp_path / "a.json", {"n": float("nan")})
    with pytest.raises(TypeError):
        durable.write_bytes(tmp_path / "a.json", "not bytes")  # type: ignore[arg-type]
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_interrupt_just_after_the_rename_stays_an_interrupt(tmp_path: Path) -> None:
    with ctrl_c_at(return_from(os.replace)) as ctrl_c, pytest.raises(KeyboardInterrupt):
        durable.write_bytes(tmp_path / "a.json", b"new")
    assert ctrl_c.sent and (tmp_path / "a.json").read_bytes() == b"new"


def test_a_name_that_is_not_utf8_is_read_back_unchanged(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \\udce9")
    durable.write_json(tmp_path / "a.json", [name, "café ✓"])
    assert json.loads((tmp_path / "a.json").read_bytes()) == [name, "café ✓"]


def test_a_path_that_leaves_its_root_is_rejected(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (tmp_path / "secret").write_text("")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "fine").symlink_to(root / "below")
    assert durable.resolve_inside(root, "below/x.jpg") == root / "below/x.jpg"
    assert durable.resolve_inside(root, "fine/x.jpg") == root / "below/x.jpg"
    assert durable.resolve_inside(root, "../secret") is None
    assert durable.resolve_inside(root, "/etc/passwd") is None
    assert durable.resolve_inside(root, "link") is None
