"""`supertuner cache build|verify|ls|prune`, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.core.errors import SuperTunerError
from tests.train.encoding.encoding_helpers import arenas, pictures


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    settings = {
        "run": {"name": "first", "output_dir": str(tmp_path / "runs")},
        "model": {"family": "wan2.2", "path": "tiny"},
        "arena": {"home": str(tmp_path / "ram")},
        "train": {"device": "cpu"},
        "cache_config": {"persistent_cache": True},
        "datasets": [
            {"id": "a", "instance_data_dir": str(pictures(tmp_path / "a", 4)), "resolution": 32, "bucket_step": 16},
            {
                "id": "b",
                "instance_data_dir": str(pictures(tmp_path / "b", 5)),
                "resolution": 32,
                "bucket_step": 16,
                "held_out": True,
            },
        ],
    }
    file.write_text(json.dumps(settings))
    return file


def call(*arguments: object, fails: int = 0) -> str:
    """Run a command and return its standard output."""
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == fails, result.output
    return result.output if fails else result.stdout


def test_build_encodes_once_and_reports_what_it_did(run_file: Path, tmp_path: Path) -> None:
    first = json.loads(call("build", run_file, "--json"))
    assert [(row["what"], row["data"], row["entries"], row["made"]) for row in first] == [
        ("latents", "training", 4, 4),
        ("text", "training", 4, 4),
        ("latents", "held-out", 5, 1),
        ("text", "held-out", 5, 1),
    ]
    assert len([name for name in arenas(tmp_path / "runs" / "cache")]) == 4
    again = call("build", run_file)
    assert again.count("nothing to encode") == 4 and "until it is removed" in again


def test_ls_shows_which_entries_are_used_and_how_many_are_missing(run_file: Path) -> None:
    call("build", run_file)
    listed = json.loads(call("ls", run_file, "--json"))
    assert [arena["verdict"] for arena in listed["arenas"]] == ["used"] * 4
    assert listed["missing"] == {"latents": 0, "text": 0}
    assert all(arena["identity"] and arena["entries"] == arena["used"] for arena in listed["arenas"])
    other = call("ls", run_file, "--set", "train.mixed_precision=fp32")
    assert "stale" in other and "5 entries of latents are missing" in other
    smaller = json.loads(call("ls", run_file, "--json", "--set", "datasets[0].limit=2", "--set", "datasets[1].limit=2"))
    assert {arena["verdict"] for arena in smaller["arenas"]} == {"partly used", "unused"}


def test_verify_finds_damage_and_build_check_repairs_it(run_file: Path, tmp_path: Path) -> None:
    call("build", run_file)
    assert call("verify", run_file).count("intact") == 4
    data = next((tmp_path / "runs" / "cache").glob("latents-*-0/0000.data"))
    content = bytearray(data.read_bytes())
    content[4096 + 5] ^= 1
    data.write_bytes(content)
    output = call("verify", run_file, fails=1)
    assert "0000.data" in output and "cache build --check" in output
    built = json.loads(call("build", run_file, "--check", "--json"))
    assert built[0]["made"] == 1
    assert call("verify", run_file).count("DAMAGED") == 1, "the damaged arena remains, and nothing of it is used"
    assert call("prune", run_file, "--yes").count("removed latents") == 1
    assert call("verify", run_file).count("intact") == 4


def test_damage_between_entries_is_repaired_too(run_file: Path, tmp_path: Path) -> None:
    call("build", run_file)
    data = next((tmp_path / "runs" / "cache").glob("latents-*-0/0000.data"))
    content = bytearray(data.read_bytes())
    content[4096 + 3000] ^= 1  # after the first entry of 1 KiB and before the next page
    data.write_bytes(content)
    assert "DAMAGED" in call("verify", run_file, fails=1)
    assert json.loads(call("build", run_file, "--check", "--json"))[0]["made"] == 0
    assert call("verify", run_file).count("DAMAGED") == 1
    call("prune", run_file, "--yes")
    assert "DAMAGED" not in call("verify", run_file)


def test_prune_lists_arenas_and_removes_them_only_with_yes(run_file: Path, tmp_path: Path) -> None:
    call("build", run_file)
    folder = tmp_path / "runs" / "cache"
    before = arenas(folder)
    assert call("prune", run_file) == "nothing to prune\n"
    fp32 = ("--set", "train.mixed_precision=fp32")
    listed = call("prune", run_file, *fp32)
    assert "nothing was removed" in listed and listed.count("stale") == 4 and arenas(folder) == before
    assert call("prune", run_file, *fp32, "--yes").count("removed latents") == 2
    assert arenas(folder) == []


def test_a_cache_that_is_not_persistent_is_built_in_memory_and_kept_for_the_next_run(
    run_file: Path, tmp_path: Path
) -> None:
    plain = ("--set", "cache_config.persistent_cache=false")
    call("build", run_file, *plain, "--set", "run.name=second")
    kept = [name for name in arenas(tmp_path / "ram") if name.startswith(("latents", "text"))]
    assert len(kept) == 4
    again = call("build", run_file, *plain, "--set", "run.name=third")
    assert again.count("nothing to encode") == 4


def test_ls_of_a_run_that_never_began_is_refused(run_file: Path) -> None:
    with pytest.raises(SuperTunerError, match="does not exist, so nothing is cached"):
        call("ls", run_file)
