"""Precedence is environment < file < code < --set; every value has an origin; paths are relative to their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from supertuner.config.sources.load import load_config
from supertuner.core.host import HostFacts


def test_each_source_overrides_the_one_before(load_text):
    environ = {"SUPERTUNER_TRAIN__BATCH_SIZE": "2"}
    tree = {"train": {"batch_size": 3}}
    size = [
        load_text({}, environ={}).config.train.batch_size,
        load_text({}, environ=environ).config.train.batch_size,
        load_text(tree, environ=environ).config.train.batch_size,
        load_text(tree, environ=environ, overrides={"train.batch_size": 4}).config.train.batch_size,
        load_text(
            tree, environ=environ, overrides={"train.batch_size": 4}, sets=["train.batch_size=5"]
        ).config.train.batch_size,
    ]
    assert size == [1, 2, 3, 4, 5]


def test_every_value_has_an_origin(load_text):
    loaded = load_text(
        {"train_batch_size": 4, "run": {"seed": 1}},
        environ={"ACCELERATE_MIXED_PRECISION": "no", "SUPERTUNER_LOADER__DROP_LAST": "1"},
        sets=["lr_warmup_steps=5"],
        overrides={"run.name": "x"},
    )
    assert loaded.origins == {
        "train.batch_size": "run.json: train_batch_size (SimpleTuner)",
        "run.seed": "run.json",
        "train.mixed_precision": "environment: ACCELERATE_MIXED_PRECISION",
        "loader.drop_last": "environment: SUPERTUNER_LOADER__DROP_LAST",
        "optimizer.lr_warmup_steps": "--set lr_warmup_steps=5 (SimpleTuner)",
        "run.name": "code",
    }
    assert loaded.config.train.mixed_precision == "fp32"
    assert loaded.config.loader.drop_last is True


def test_an_alias_in_the_file_is_overridden_by_the_canonical_name_in_a_set(load_text):
    assert load_text({"train_batch_size": 4}, sets=["train.batch_size=8"]).config.train.batch_size == 8


def test_the_last_of_several_sets_wins(load_text):
    assert load_text({}, sets=["run.seed=1", "seed=2"]).config.run.seed == 2


def test_a_set_reaches_into_lists(load_text):
    tree = {"datasets": [{"id": "a"}, {"id": "b", "resolution": 512}]}
    sets = [
        "datasets[1].in_memory.compression=lz4",
        "datasets[1].resolution[1]=768",
        "datasets[2].id=c",
        "datasets[0].resolution=[256, 512]",
    ]
    one, two, three = load_text(tree, sets=sets).config.datasets
    assert (one.resolution, two.resolution, three.id) == ((256, 512), (512, 768), "c")
    assert two.in_memory.compression == "lz4"


def test_a_set_can_replace_the_whole_list(load_text):
    loaded = load_text({"datasets": [{"id": "a"}, {"id": "b"}]}, sets=['datasets=[{"id": "c"}]'])
    assert [d.id for d in loaded.config.datasets] == ["c"]


def test_a_set_beyond_the_end_of_a_list_is_refused(refuse):
    (problem,) = refuse({"datasets": [{"id": "a"}]}, sets=["datasets[5].id=b"])
    assert problem.startswith("datasets[5].id: there is no such entry; the list has 1")


@pytest.mark.parametrize("text", ["train.batch_size", "=4", "a..b=1", "[0]=1", "datasets[x].id=1", ""])
def test_a_set_that_is_not_path_and_value_is_refused_with_an_example(refuse, text):
    (problem,) = refuse({}, sets=[text])
    assert "train.batch_size=4" in problem


def test_text_from_set_and_environment_is_converted_to_the_type_of_the_setting(load_text):
    config = load_text(
        {"datasets": [{}]},
        sets=[
            "run.name=123",
            "optimizer.learning_rate=.5",
            "train.gradient_checkpointing=yes",
            "arena.keep=12",
            "datasets[0].captions.constant=null",
            "datasets[0].captions.trigger_word=true",
        ],
        environ={"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "0", "GH200_UVM_OVERSUBSCRIPTION_RATIO": "3"},
    ).config
    assert (config.run.name, config.optimizer.learning_rate, config.train.gradient_checkpointing) == ("123", 0.5, True)
    assert (config.arena.keep, config.datasets[0].captions.constant) == (12, None)
    assert config.datasets[0].captions.trigger_word == "true"
    assert config.gh200_optimizations.enable_uvm_hints is False
    assert config.memory.overflow.oversubscription_ratio == 3.0


def test_text_in_a_file_is_not_converted_to_a_number(refuse):
    (problem,) = refuse({"train": {"batch_size": "4"}})
    assert problem.startswith('train.batch_size: "4" is not allowed; allowed: a whole number from 1')
    assert problem.endswith("write it without quotes")


def test_an_unknown_supertuner_variable_is_refused_with_a_suggestion(refuse):
    (problem,) = refuse({}, environ={"SUPERTUNER_TRAIN__BATCHSIZE": "4", "PATH": "/bin", "SUPERTUNER_RUN__SEED": ""})
    assert problem == (
        "environment: SUPERTUNER_TRAIN__BATCHSIZE: not a setting; did you mean SUPERTUNER_TRAIN__BATCH_SIZE?"
    )


def test_a_wrong_value_from_the_environment_names_the_variable(refuse):
    (problem,) = refuse({}, environ={"GH200_UVM_ACCESS_PATTERN": "gpu_frist"})
    assert 'did you mean "gpu_first"?' in problem
    assert "GH200_UVM_ACCESS_PATTERN" in problem


def test_paths_in_a_file_are_relative_to_it_and_others_to_the_working_directory(load_text, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    tree = {"datasets": [{"instance_data_dir": "cats"}, {"instance_data_dir": "../dogs"}], "arena": {"home": "~/a"}}
    config = load_text(tree, sets=["arena.disk_home=here"]).config
    assert config.datasets[0].instance_data_dir == tmp_path / "cats"
    assert config.datasets[1].instance_data_dir == tmp_path.parent / "dogs"
    assert config.arena.disk_home == elsewhere / "here"
    assert config.arena.home == Path("~/a").expanduser()
    assert config.run.output_dir == elsewhere / "runs"


def test_a_configuration_needs_no_file():
    loaded = load_config(None, environ={}, sets=["run.seed=7"])
    assert (loaded.config.run.seed, loaded.file_content) == (7, b"")


def test_datasets_without_an_id_are_named_after_their_folders_and_stay_unique(load_text):
    tree = {"datasets": [{"instance_data_dir": d} for d in ("a/my cats", "b/my cats", "c/my-cats-3.tar")] + [{}]}
    tree["datasets"].append({"id": "my-cats-2"})
    ids = [d.id for d in load_text(tree).config.datasets]
    assert ids == ["my-cats", "my-cats-3", "my-cats-3-2", "dataset-3", "my-cats-2"]


def test_a_memory_limit_above_the_machine_is_lowered_with_a_warning(load_text, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  67108864 kB\nMemAvailable:  1 kB\n")
    tree = {"datasets": [{"in_memory": {"memory_limit_gb": 360}}, {"in_memory": {"memory_limit_gb": 63.5}}]}
    loaded = load_text(tree, host=HostFacts(tmp_path))
    assert [d.in_memory.memory_limit_gb for d in loaded.config.datasets] == [64, 63.5]
    (note,) = [n for n in loaded.notes if "memory_limit_gb" in n.what]
    assert "360 is more than this machine has; lowered to 64" in note.message
    assert "lowered" in loaded.origins["datasets[0].in_memory.memory_limit_gb"]


def test_the_resolved_configuration_is_json_with_origins_and_notes(load_text):
    import json

    saved = json.loads(json.dumps(load_text({"train_batch_size": 4}).to_dict()))
    assert saved["config"]["train"]["batch_size"] == 4
    assert saved["origins"]["train.batch_size"] == "run.json: train_batch_size (SimpleTuner)"
