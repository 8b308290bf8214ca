"""`supertuner cache build|verify|ls|prune`, as typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supertuner.arena.home import ArenaHome
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


def test_build_says_that_nothing_is_kept_of_entries_that_are_refreshed_each_epoch(run_file: Path) -> None:
    augmented = (
        "--set",
        "datasets[0].augment.flip=0.5",
        "--set",
        "datasets[0].augmentations_cache_mode=refresh_each_epoch",
    )
    latents, text = call("build", run_file, *augmented).splitlines()[:2]
    assert latents == "latents of training data: nothing is cached in advance; training encodes what it uses"
    assert text.startswith("text of training data: 4 entries") and "stays" in text


def test_ls_shows_which_entries_are_used_and_how_many_are_missing(run_file: Path) -> None:
    call("build", run_file)
    listed = json.loads(call("ls", run_file, "--json"))
    assert [arena["verdict"] for arena in listed["arenas"]] == ["used"] * 4
    assert listed["missing"] == {"latents": 0, "text": 0}
    assert all(arena["identity"] and arena["entries"] == arena["used"] for arena in listed["arenas"])
    other = call("ls", run_file, "--set", "train.mixed_precision=fp32")
    assert "stale" in other and "5 entries of latents are missing" in other
    limits = ("--set", "datasets[0].limit=2", "--set", "datasets[1].limit=2")
    assert CliRunner().invoke(app, ["stage", str(run_file), *limits, "--set", "run.name=limited"]).exit_code == 0
    smaller = json.loads(call("ls", run_file, "--json", *limits))
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


def everything_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Each path below a folder with its inode and time of modification."""
    paths = sorted(folder.rglob("*"))
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in paths}


@pytest.mark.parametrize("command", ["ls", "prune", "verify"])
def test_looking_stages_nothing_and_knows_what_is_stale_without_the_data(
    command: str, run_file: Path, tmp_path: Path
) -> None:
    call("build", run_file)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "ram")
    before = everything_below(tmp_path)
    output = call(command, run_file)
    assert everything_below(tmp_path) == before
    if command == "prune":
        assert output == "nothing to prune\n"
    else:
        assert output.count("unknown") == 4 and "unused" not in output
    assert call(command, run_file, "--set", "train.mixed_precision=fp32").count("stale") == 4
    assert everything_below(tmp_path) == before


def test_prune_removes_what_is_stale_and_keeps_what_datasets_that_are_not_staged_may_use(
    run_file: Path, tmp_path: Path
) -> None:
    call("build", run_file)
    fp32 = ("--set", "train.mixed_precision=fp32")
    call("build", run_file, *fp32, "--set", "run.name=second")
    shutil.rmtree(tmp_path / "ram")
    result = CliRunner().invoke(app, ["cache", "prune", str(run_file), "--yes"])
    assert result.stdout.count("removed latents") == 2 and result.stdout.count("removed text") == 2
    assert result.stderr.count("is unknown: it is not staged") == 2 and "`supertuner stage`" in result.stderr
    assert len(arenas(tmp_path / "runs" / "cache")) == 4


def test_a_dataset_whose_folder_is_gone_is_known_by_its_arena(run_file: Path, tmp_path: Path) -> None:
    call("build", run_file)
    shutil.rmtree(tmp_path / "a")
    listed = json.loads(call("ls", run_file, "--json"))
    assert [arena["verdict"] for arena in listed["arenas"]] == ["used"] * 4 and listed["unstaged"] == {}


def test_looking_at_what_a_killed_run_left_in_memory_does_not_remove_it(run_file: Path, tmp_path: Path) -> None:
    call("build", run_file, "--set", "arena.keep=run")
    home = ArenaHome(tmp_path / "ram")
    with home.build("latents-00000000-0", life="run") as build, build.open_writer() as writer:
        with writer.begin("0" * 32) as unit:
            unit.put("latents", memoryview(b"x"))
        writer.close()
        build.seal({"holds": "cache", "what": "latents"})
    memory = ("--set", "cache_config.persistent_cache=false")
    for command in ("ls", "prune", "verify"):
        assert "latents-00000000-0" in call(command, run_file, *memory)
    assert "latents-00000000-0" in arenas(tmp_path / "ram")


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
