"""A command's surroundings: which folder a run gets, and what stays in it."""

import json
from pathlib import Path

import pytest

from supertuner.core.errors import RunFolderError, SourceError
from supertuner.tools.sample_data import make_sample_data
from supertuner.tools.session import load_narrowed, session
from supertuner.tools.staging import stage_all


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = make_sample_data(tmp_path / "data", images=6, videos=1, sounds=1).config
    given = json.loads(made.read_text())
    given["arena"] = {"home": "../arenas"}
    given["run"]["output_dir"] = "../runs"
    made.write_text(json.dumps(given))
    return made


def test_a_run_without_a_name_gets_a_folder_of_its_own_for_each_configuration(config: Path) -> None:
    with session(load_narrowed(config, ())) as first:
        pass
    with session(load_narrowed(config, ())) as again:
        pass
    with session(load_narrowed(config, ["run.seed=7"])) as other:
        pass
    assert first.folder.path == again.folder.path != other.folder.path
    assert first.folder.path.name.startswith("config-")


def test_a_named_run_refuses_other_settings_and_says_which(config: Path) -> None:
    with session(load_narrowed(config, ["run.name=mine"])):
        pass
    with pytest.raises(RunFolderError, match=r"run\.seed: 0 there, 7 here"):
        session(load_narrowed(config, ["run.name=mine", "run.seed=7"])).__enter__()


def test_the_limit_of_a_command_reaches_every_dataset_and_its_origin_is_told(config: Path) -> None:
    loaded = load_narrowed(config, (), limit=2)
    assert [dataset.limit for dataset in loaded.config.datasets] == [2, 2, 2]
    assert "limit" in loaded.origins["datasets[2].limit"]
    with session(loaded) as work:
        assert [result.files for result in stage_all(work)] == [2, 1, 1]


def test_what_staging_decided_and_set_aside_stays_with_the_run(config: Path) -> None:
    (config.parent / "images" / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    with session(load_narrowed(config, ["datasets[0].max_broken_share=0.5"])) as work:
        stage_all(work)
    folder = work.folder.path
    decided = {one["what"]: one for one in json.loads((folder / "decisions.json").read_text())}
    assert decided["datasets[pictures].in_memory.num_workers"]["reason"]
    aside = [json.loads(line) for line in (folder / "set_aside.jsonl").read_text().splitlines()]
    assert [one["file"] for one in aside] == ["torn.jpg"]
    assert (folder / "config.given.json").read_bytes() == config.read_bytes()
    assert (config.parent / "images" / "torn.jpg").exists()


def test_a_configuration_without_datasets_says_so(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    with pytest.raises(SourceError, match=r"empty\.json names no dataset"):
        session(load_narrowed(empty, ())).__enter__()
