"""The session of a command: which folder a run gets, and what is stored in it."""

import json
from pathlib import Path

import pytest

from supertuner.api.session import load_command_config, open_session
from supertuner.core.errors import ConfigError, RunFolderError, SourceError
from supertuner.tools.sample_data import make_sample_data
from supertuner.tools.staging import stage_all_datasets


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = make_sample_data(tmp_path / "data", images=6, videos=1, sounds=1).config
    settings = json.loads(path.read_text())
    settings["arena"] = {"home": "../arenas"}
    settings["run"]["output_dir"] = "../runs"
    path.write_text(json.dumps(settings))
    return path


def test_a_run_without_a_name_gets_one_folder_per_configuration(config: Path) -> None:
    with open_session(load_command_config(config, ())) as first:
        pass
    with open_session(load_command_config(config, ())) as again:
        pass
    with open_session(load_command_config(config, ["run.seed=7"])) as other:
        pass
    assert first.run_folder.path == again.run_folder.path != other.run_folder.path
    assert first.run_folder.path.name.startswith("config-")


def test_memory_settings_may_change_between_two_sessions_of_a_run(config: Path) -> None:
    with open_session(load_command_config(config, ())) as first:
        (first.run_folder.path / "losses.jsonl").write_text("{}\n")
    sets = ["memory.overflow.enabled=true", "gh200_optimizations.enable_uvm_hints=false", "report.memory_every_steps=1"]
    with open_session(load_command_config(config, sets)) as again:
        assert again.run_folder.path == first.run_folder.path
        changed = " ".join(again.run_folder.changed_settings)
        assert all(setting.split("=")[0] in changed for setting in sets)
    assert "settings changed since the last session" in (first.run_folder.path / "events.jsonl").read_text()


def test_a_named_run_refuses_changed_settings_and_names_them(config: Path) -> None:
    with open_session(load_command_config(config, ["run.name=mine"])) as work:
        (work.run_folder.path / "losses.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match=r"run\.seed: 0 there, 7 here"):
        open_session(load_command_config(config, ["run.name=mine", "run.seed=7"])).__enter__()


def test_the_limit_of_a_command_applies_to_every_dataset_and_its_origin_is_recorded(config: Path) -> None:
    loaded = load_command_config(config, (), limit=2)
    assert [dataset.limit for dataset in loaded.config.datasets] == [2, 2, 2]
    assert "limit" in loaded.origins["datasets[2].limit"]
    with open_session(loaded) as work:
        assert [result.files for result in stage_all_datasets(work)] == [2, 1, 1]


def test_decisions_of_staging_and_files_set_aside_are_stored_with_the_run(config: Path) -> None:
    (config.parent / "images" / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    with open_session(load_command_config(config, ["datasets[0].max_broken_share=0.5"])) as work:
        stage_all_datasets(work)
    folder = work.run_folder.path
    decisions = {decision["what"]: decision for decision in json.loads((folder / "decisions.json").read_text())}
    assert decisions["datasets[pictures].in_memory.num_workers"]["reason"]
    aside = [json.loads(line) for line in (folder / "set_aside.jsonl").read_text().splitlines()]
    assert [record["file"] for record in aside] == ["torn.jpg"]
    assert (folder / "config.given.json").read_bytes() == config.read_bytes()
    assert (config.parent / "images" / "torn.jpg").exists()


def test_a_configuration_without_datasets_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    with pytest.raises(SourceError, match=r"empty\.json: there is no dataset"):
        open_session(load_command_config(empty, ())).__enter__()


def test_a_named_run_can_be_tried_on_a_few_samples_first(config: Path) -> None:
    with open_session(load_command_config(config, ["run.name=mine"], limit=2, strict=True)) as tried:
        pass
    with open_session(load_command_config(config, ["run.name=mine"])) as whole:
        pass
    assert (tried.run_folder.path.name, whole.run_folder.path.name) == ("mine-limit-2-strict", "mine")


def test_a_staged_dataset_is_found_although_its_folder_was_moved_or_unmounted(config: Path) -> None:
    with open_session(load_command_config(config, ())) as work:
        fresh = stage_all_datasets(work)
    pictures, sounds = config.parent / "images", config.parent / "sounds"
    pictures.rename(config.parent / "moved")
    sounds.rename(config.parent / "unmounted")
    sounds.mkdir()
    with open_session(load_command_config(config, ())) as work:
        again = stage_all_datasets(work)
    assert [result.arena for result in again] == [result.arena for result in fresh]
    assert [result.reused for result in again] == [True, True, True]
    assert "source is gone" in again[0].reuse_reason and "nothing has changed" in again[1].reuse_reason


def test_a_missing_folder_is_refused_if_nothing_was_staged_from_it_with_these_settings(config: Path) -> None:
    with open_session(load_command_config(config, ())) as work:
        stage_all_datasets(work)
    (config.parent / "images").rename(config.parent / "moved")
    for sets in (["datasets[0].in_memory.compression=lz4"], ["datasets[0].id=other"], ["arena.home=nowhere"]):
        with pytest.raises(ConfigError, match=r"instance_data_dir.*is not a folder"):
            load_command_config(config, sets)
    with pytest.raises(ConfigError, match=r"(?s)instance_data_dir.*batch_size"):
        load_command_config(config, ["train.batch_size=0"])
