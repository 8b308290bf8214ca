"""The output of `supertuner arena` commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typer.testing import CliRunner, Result

from supertuner.arena.home import HOME_MARKER, ArenaHome
from supertuner.cli.arena import app
from supertuner.core.errors import ArenaBusyError, ArenaError, ArenaMissingError
from tests.arena.arena_helpers import build, units


def run(home: ArenaHome, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments, "--home", str(home.path)], input=answer)


def test_ls_lists_the_arenas(home: ArenaHome) -> None:
    assert "no arenas in" in run(home, "ls").output
    build(home, "cats", units(9))
    with home.attach("cats"):
        shown = run(home, "ls").output
    assert all(word in shown for word in ("cats", "in use", "9", "until removed"))
    assert "sealed" in run(home, "ls").output


def test_ls_shows_complete_names_in_one_line_on_a_narrow_screen(home: ArenaHome) -> None:
    name = "a-dataset-with-a-very-long-name-" + "x" * 64
    build(home, name, units(1))
    assert any(line.startswith(f"{name} ") for line in run(home, "ls").output.splitlines())


def test_listing_a_missing_folder_does_not_create_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ls", "--home", str(tmp_path / "typo")])
    assert isinstance(result.exception, ArenaError) and "is not a folder" in str(result.exception)
    assert not (tmp_path / "typo").exists()


def test_ls_json_prints_machine_readable_rows(home: ArenaHome) -> None:
    build(home, "cats", units(9))
    build(home, "dogs", units(2))
    (home.path / "dogs" / "head").write_bytes(b"")
    cats, dogs = json.loads(run(home, "ls", "--json").output)
    assert (cats["name"], cats["state"], cats["units"], cats["users"]) == ("cats", "sealed", 9, False)
    assert cats["nbytes"] > 0 and cats["meta"] == {"made": "by a test"} and cats["life"] == "until_removed"
    assert dogs["state"] == "damaged" and "head" in dogs["problem"]


def test_verify_names_the_damaged_arena_and_fails(home: ArenaHome) -> None:
    for name in ("cats", "dogs"):
        build(home, name, units(9))
    assert run(home, "verify").exit_code == 0
    with (home.path / "dogs" / "0000.data").open("r+b") as data:
        data.seek(5000)
        data.write(b"!")
    result = run(home, "verify")
    assert result.exit_code == 1 and "cats: intact, 9 units" in result.output
    assert "dogs: damaged" in result.output and "0000.data" in result.output
    assert run(home, "verify", "cats").exit_code == 0


def test_rm_asks_first(home: ArenaHome) -> None:
    build(home, "cats", units(9))
    refused = run(home, "rm", "cats", answer="n\n")
    assert (
        refused.exit_code == 1 and "remove cats" in refused.output and [i.name for i in home.list_arenas()] == ["cats"]
    )
    assert run(home, "rm", "cats", answer="y\n").exit_code == 0
    assert os.listdir(home.path) == [HOME_MARKER]


def test_rm_yes_does_not_ask_and_raises_for_an_arena_in_use(home: ArenaHome) -> None:
    build(home, "cats", units(9))
    with home.attach("cats"):
        assert isinstance(run(home, "rm", "--yes", "cats").exception, ArenaBusyError)
    assert run(home, "rm", "--yes", "cats").exit_code == 0
    assert isinstance(run(home, "rm", "--yes", "cats").exception, ArenaMissingError)
