"""Fingerprints of encoder files: every byte and every name counts, and no memo can make them wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from supertuner.core.errors import ModelError
from supertuner.models.family_loader import load_family
from supertuner.models.fingerprint import fingerprint
from supertuner.models.spec import ModelSource


@pytest.fixture
def files(tiny_wan: ModelSource, tmp_path: Path) -> list[Path]:
    wan = load_family("wan2.2")
    copy = shutil.copytree(tiny_wan.path, tmp_path / "pipeline")
    model = wan.read_model(ModelSource(str(copy)))
    return [*wan.media_files(model), *wan.text_files(model)]


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("memo", [None, "memo.json"])
def test_one_changed_byte_of_any_file_changes_the_fingerprint(
    files: list[Path], tmp_path: Path, memo: str | None
) -> None:
    remembered = tmp_path / memo if memo else None
    seen = {fingerprint(files, remembered)}
    for file in files:
        flip(file, file.stat().st_size // 2)
        seen.add(fingerprint(files, remembered))
    assert len(seen) == len(files) + 1


def test_one_changed_config_entry_changes_the_fingerprint(files: list[Path]) -> None:
    before = fingerprint(files, None)
    config = next(file for file in files if file.name == "config.json")
    entries = json.loads(config.read_text())
    config.write_text(json.dumps(entries | {"z_dim": entries["z_dim"] + 1}))
    assert fingerprint(files, None) != before


def test_a_renamed_or_missing_file_changes_the_fingerprint_and_the_order_does_not(files: list[Path]) -> None:
    before = fingerprint(files, None)
    assert fingerprint(files[::-1], None) == before
    assert fingerprint(files[1:], None) != before
    renamed = files[0].rename(files[0].with_name("other.json"))
    assert fingerprint([renamed, *files[1:]], None) != before


def test_a_new_modification_time_does_not_change_the_fingerprint(files: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "deep" / "memo.json"
    before = fingerprint(files, memo)
    for file in files:
        os.utime(file, ns=(1, 1))
    assert fingerprint(files, memo) == before
    memo.unlink()
    assert fingerprint(files, memo) == before


def test_files_in_the_memo_are_not_read_again(files: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    before = fingerprint(files, memo)
    written = memo.stat().st_mtime_ns
    content = json.loads(memo.read_text())
    for entry in content["files"].values():
        entry["digest"] = "0" * 32
    memo.write_text(json.dumps(content))
    assert fingerprint(files, memo) != before, "the memo was not used"
    memo.unlink()
    fingerprint(files, memo)
    unchanged = memo.stat().st_mtime_ns
    fingerprint(files, memo)
    assert memo.stat().st_mtime_ns == unchanged != written


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1]", b'{"format": 1}', b'{"format": 1, "files": {"x": {"a": 2}}}', b'{"format": 99}', b"\xff"],
)
def test_a_damaged_memo_is_ignored_and_rewritten(files: list[Path], tmp_path: Path, damage: bytes) -> None:
    memo = tmp_path / "memo.json"
    before = fingerprint(files, memo)
    good = memo.read_bytes()
    memo.write_bytes(damage)
    assert fingerprint(files, memo) == before
    assert memo.read_bytes() == good


def test_a_memo_keeps_its_entries_of_other_files(files: list[Path], tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    fingerprint(files[:1], memo)
    fingerprint(files[1:], memo)
    assert set(json.loads(memo.read_text())["files"]) == {str(file.resolve()) for file in files}


def test_a_link_has_the_fingerprint_of_its_target(files: list[Path], tmp_path: Path) -> None:
    links = tmp_path / "links" / files[0].parent.name
    links.mkdir(parents=True)
    (links / files[0].name).symlink_to(files[0])
    assert fingerprint([links / files[0].name], None) == fingerprint(files[:1], None)


def test_a_file_that_cannot_be_read_raises_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone.safetensors cannot be read: No such file"):
        fingerprint([tmp_path / "gone.safetensors"], None)
