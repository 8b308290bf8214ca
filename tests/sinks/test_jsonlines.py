"""A file of JSON lines survives a kill: complete lines stay, an incomplete last line is left out."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from supertuner.core.errors import RunFolderError
from supertuner.sinks.jsonlines import JsonLinesFile, read_records


@pytest.mark.parametrize(
    "incomplete", [b'{"n": 2', b"{", b'{"n": 2}', '{"name": "caf\u00e9'.encode()[:-1], b"\x00" * 70_000]
)
def test_an_incomplete_last_line_is_left_out_and_appending_works(tmp_path: Path, incomplete: bytes) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"n": 1}\n' + incomplete)
    assert list(read_records(file)) == [{"n": 1}]
    with JsonLinesFile(file) as lines:
        lines.append({"n": 3})
    assert list(read_records(file)) == [{"n": 1}, {"n": 3}]


def test_a_file_with_only_an_incomplete_line_is_emptied(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"n"')
    with JsonLinesFile(file) as lines:
        lines.append({"n": 1})
    assert list(read_records(file)) == [{"n": 1}]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"n": 1}\n{"n"\n{"n": 3}\n')
    with pytest.raises(RunFolderError, match=r"events\.jsonl, line 2 is not JSON"):
        list(read_records(file))


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []


def test_a_line_break_inside_a_value_is_escaped(tmp_path: Path) -> None:
    with JsonLinesFile(tmp_path / "x.jsonl") as lines:
        lines.append({"text": "two\nlines \u2028 and more"})
        lines.append({"n": 2})
    assert list(read_records(tmp_path / "x.jsonl")) == [{"text": "two\nlines \u2028 and more"}, {"n": 2}]


def test_a_full_disk_is_a_run_folder_error_that_names_the_file(tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLinesFile(tmp_path / "x.jsonl") as lines:
        lines.append({"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, unlimited[1]))
        try:
            with pytest.raises(RunFolderError, match=r"x\.jsonl cannot be written: File too large"):
                lines.append({"text": "long " * 20})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert list(read_records(tmp_path / "x.jsonl")) == [{"n": 1}]
