"""All problems of a file are reported at once, each with its path, value, allowed values and the closest key."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.config.dialects.key_tables import dataset_keys, inherited_keys, run_keys
from supertuner.config.settings import key_paths
from supertuner.config.sources.load import load_config
from supertuner.config.sources.problems import closest_match, edit_distance, letter_difference
from supertuner.core.errors import ConfigError


def test_all_errors_of_a_file_are_reported_at_once_in_the_order_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text("""{
      "datasets": [{"in_memory": {"memory_limt_gb": 3}}, {"instance_data_dir": "data/cats"}],
      "gh200_optimizations": {"initial_effective_batch_size": 4, "target_effective_batch_size": 2}
    }""")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.json", environ={})
    assert (
        str(caught.value)
        == """\
config error in run.json
  datasets[0].in_memory.memory_limt_gb: not a setting; did you mean memory_limit_gb?
  datasets[1].instance_data_dir: "data/cats" is not a folder (looked in the folder of run.json)
  gh200_optimizations.target_effective_batch_size: 2 is below initial_effective_batch_size 4; the ramp must not decrease
3 errors; nothing was started"""
    )
    assert caught.value.exit_code == 2


def test_invalid_values_do_not_hide_contradictions_between_others(refuse):
    problems = refuse(
        {
            "datasets": [{"id": "a", "resolution": "x"}, {"id": "a", "frames": 17}, {"id": "b", "weight": -1}],
            "train": {"batch_size": 0},
            "validation": {"width": 64, "fps": "x"},
        }
    )
    assert {p.split(":")[0] for p in problems} == {
        "datasets[0].resolution",
        "datasets[1].frames",
        "datasets[2].weight",
        "train.batch_size",
        "validation.fps",
        "validation.height",
        "datasets[0].id",
        "datasets[1].id",
    }


def test_a_contradiction_with_an_invalid_value_is_not_reported(refuse):
    tree = {"gh200_optimizations": {"enable_batch_size_rampup": True, "initial_effective_batch_size": "4"}}
    (problem,) = refuse(tree)
    assert '"4" is not allowed' in problem


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"batch_size": 4}, "batch_size: not a setting; did you mean train.batch_size?"),
        ({"memory_limit_gb": 4}, "did you mean datasets[].in_memory.memory_limit_gb?"),
        (
            {"datasets": [{"compression": "lz4"}]},
            "datasets[0].compression: not a setting; did you mean in_memory.compression?",
        ),
        ({"train-batch-size": 4}, "did you mean train_batch_size?"),
        ({"qwertyuiop": 4}, "qwertyuiop: not a setting; known here: run, model, adapter, objective, datasets, arena"),
        (
            {"arena": {"keep": -1}},
            'arena.keep: -1 is not allowed; allowed: one of "until_removed", "run" or a number above 0',
        ),
        ({"datasets": [{"in_memory": {"compression": "lz5"}}]}, 'did you mean "lz4"?'),
        ({"datasets": [{"frames": [17, "x"], "dataset_type": "video"}]}, 'datasets[0].frames[1]: "x" is not allowed'),
        ({"datasets": [{"id": "../etc"}]}, 'datasets[0].id: "../etc" is not allowed; allowed: text of letters'),
        ({"train": {"batch_size": True}}, "train.batch_size: true is not allowed"),
        ({"train": {"gradient_checkpointing": 1}}, "1 is not allowed; allowed: true or false"),
        ({"train": {"batch_size": 4.0}}, "train.batch_size: 4.0 is not allowed"),
        ({"train": {"batch_size": None}}, "train.batch_size: null is not allowed"),
        ({"train": 5}, "train: 5 is not a block; a block holds batch_size"),
        ({"datasets": {}}, "datasets: {} is not a list of datasets"),
        ({"datasets": [5]}, "datasets[0]: 5 is not a block"),
        (
            {"datasets": [{"captions": {"source": "constant"}}]},
            'datasets[0].captions.constant: is missing: source is "constant"',
        ),
        ({"datasets": [{"resolution": 32}]}, "datasets[0].resolution: 32 is below bucket_step 64"),
        (
            {"datasets": [{"dataset_type": "audio", "augment": {"flip": 0.5}}]},
            "datasets[0].augment.flip: has no meaning",
        ),
        ({"datasets": [{"frames": 17}]}, 'datasets[0].frames: 17 needs dataset_type "video", not "image"'),
        ({"gh200_optimizations": {"enable_batch_size_rampup": True}}, "initial_effective_batch_size: is missing"),
        ({"initial_effective_batch_size": 64, "train_batch_size": 32}, "64 is above the end of the ramp"),
        (
            {"optimizer": {"name": "automagic", "high_noise_max_lr": 1e-8}},
            "optimizer.high_noise_max_lr: 1e-08 is below min_lr, which defaults to 1e-07; set both",
        ),
        (
            {"optimizer": {"name": "automagic", "low_noise_min_lr": 0.01}},
            "optimizer.low_noise_min_lr: 0.01 is above max_lr, which defaults to 0.001; set both",
        ),
        ({"optimizer": {"min_lr": 1e-3, "max_lr": 1e-4}}, "optimizer.max_lr: 0.0001 is below min_lr 0.001"),
        (
            {"optimizer": {"min_lr": 1e-3, "low_noise_max_lr": 1e-4}},
            "optimizer.low_noise_max_lr: 0.0001 is below min_lr 0.001",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_path_value_and_remedy(refuse, tree, says):
    (problem,) = refuse(tree)
    assert says in problem


@pytest.mark.parametrize(
    ("tree", "setting", "says"),
    [
        (
            {"datasets": [{"captions": {"keep_tags": 2}}]},
            "datasets[0].captions.keep_tags",
            "while shuffle_tags is false",
        ),
        (
            {"datasets": [{"resolution": [1000, 512]}]},
            "datasets[0].resolution",
            "1000 is not a multiple of bucket_step 64",
        ),
        ({"datasets": [{"dataset_type": "video", "frames": 16}]}, "datasets[0].frames", "4n + 1"),
        ({"datasets": [{"fps": 16}]}, "datasets[0].fps", 'no effect with dataset_type "image"'),
        ({"optimizer": {"lr_bump": 1e-6}}, "optimizer.lr_bump", 'without name: "automagic"'),
        (
            {"model": {"family": "sdxl", "path": "here"}, "objective": {"guidance": 3.5}},
            "objective.guidance",
            'has no effect: guidance is not an input of models of family "sdxl"',
        ),
        ({"datasets": [{"id": "a"}]}, "datasets[0]", "nothing to stage"),
        (
            {
                "initial_effective_batch_size": 4,
                "gh200_optimizations": {"enable_batch_size_rampup": False},
                "train_batch_size": 8,
            },
            "gh200_optimizations.initial_effective_batch_size",
            "no effect while",
        ),
    ],
)
def test_unwise_settings_produce_warnings(load_text, tree, setting, says):
    assert any(note.what == setting and says in note.message for note in load_text(tree).notes)


def test_a_consistent_configuration_has_no_notes(load_text, tmp_path):
    (tmp_path / "cats").mkdir()
    loaded = load_text({"datasets": [{"instance_data_dir": "cats", "resolution": 512}]}, check_paths=True)
    assert loaded.notes == ()


def test_a_dataset_may_be_a_folder_or_a_tar_file(load_text, refuse, tmp_path):
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / "a.zip").write_bytes(b"")
    load_text({"datasets": [{"instance_data_dir": "a.tar"}]}, check_paths=True)
    (problem,) = refuse({"datasets": [{"instance_data_dir": "a.zip"}]}, check_paths=True)
    assert '"a.zip" is not a folder or a .tar file' in problem


def every_key() -> list[tuple[str, str]]:
    """(pattern of the block, name) of every key at every level, blocks included."""
    return [(block, name) for block in key_paths.blocks() for name in key_paths.names_in_block(block)]


def typos(word: str, rng: random.Random) -> list[str]:
    at = rng.randrange(len(word))
    letter = rng.choice(string.ascii_lowercase)
    swap = rng.randrange(max(1, len(word) - 1))
    return [
        word[:at] + word[at + 1 :],
        word[:at] + letter + word[at + 1 :],
        word[:at] + letter + word[at:],
        word[:swap] + word[swap : swap + 2][::-1] + word[swap + 2 :],
    ]


def test_a_one_letter_typo_in_any_key_is_refused_and_the_right_key_suggested(refuse):
    rng = random.Random(1)
    tried, right, wrong = 0, 0, []
    for block, name in every_key():
        known = {
            *key_paths.names_in_block(block),
            *run_keys(),
            *dataset_keys(""),
            *inherited_keys(),
            "config",
            "dataset",
            "",
        }
        for typo in {t for _ in range(2) for t in typos(name, rng)} - known:
            tree: object = {typo: 1}
            for step in reversed([s for s in block.split(".") if s]):
                tree = {"datasets": [tree]} if step == "datasets[]" else {step: tree}
            (problem,) = refuse(tree)
            assert typo in problem.split(": ")[0]
            tried += 1
            if f"did you mean {name}?" in problem:
                right += 1
            else:
                wrong.append((block, name, typo, problem))
    assert tried > 500
    assert right / tried >= 0.95, wrong


def test_edit_distance_counts_letters():
    assert edit_distance("seed", "seed") == 0
    assert [edit_distance("seed", w) for w in ("sed", "seeed", "sead", "sede")] == [1, 1, 1, 1]
    assert edit_distance("", "abc") == 3


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_the_lower_bound_is_not_above_the_edit_distance(a, b):
    assert max(abs(len(a) - len(b)), letter_difference(a, b)) <= edit_distance(a, b)
    assert letter_difference(a, a) == 0


@given(st.text("abc", min_size=1, max_size=7), st.lists(st.text("abc", min_size=1, max_size=7), max_size=6))
def test_the_closest_match_has_the_smallest_distance_and_is_the_first_of_equals(word, candidates):
    distances = [edit_distance(word, candidate) for candidate in candidates]
    best = min((n for n in distances if n <= max(1, len(word) // 3)), default=None)
    assert closest_match(word, candidates) == (None if best is None else candidates[distances.index(best)])


def test_a_word_without_a_close_candidate_has_no_match():
    assert closest_match("zzzzzz", ["batch_size", "seed"]) is None
