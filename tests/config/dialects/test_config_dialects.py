"""SimpleTuner's and ai-toolkit's files mean here what they mean there; what has no effect says so."""

from __future__ import annotations

import json

import pytest

from supertuner.config.dialects.key_tables import DATASET_KEYS, RUN_KEYS, dataset_keys
from supertuner.config.settings import key_paths

SIMPLETUNER = {
    "--data_backend_config": "datasets/multi.json",
    "--train_batch_size": 4,
    "--gradient_accumulation_steps": "2",
    "--max_train_steps": 1000,
    "--num_train_epochs": 0,
    "--mixed_precision": "no",
    "--gradient_checkpointing": "true",
    "--learning_rate": "1e-4",
    "--optimizer": "ao-adamw8bit",
    "--lr_scheduler": "constant_with_warmup",
    "--lr_warmup_steps": 100,
    "--seed": 42,
    "--output_dir": "output",
    "--resolution": 1.0,
    "--resolution_type": "area",
    "--caption_dropout_probability": 0.1,
    "--push_to_hub": "false",
}
BACKENDS = [
    {
        "id": "my pictures",
        "type": "local",
        "instance_data_dir": "pictures",
        "crop": True,
        "crop_style": "random",
        "crop_aspect": "square",
        "caption_strategy": "textfile",
        "repeats": 0,
        "probability": 0.5,
        "cache_dir_vae": "cache/vae",
    },
    {
        "id": "clips",
        "type": "in_memory",
        "dataset_type": "video",
        "resolution": 480,
        "resolution_type": "pixel_area",
        "caption_strategy": "instanceprompt",
        "instance_prompt": "a clip",
        "repeats": 9,
        "video": {"num_frames": 81, "min_frames": 81},
        "caption_shuffle": {"enable": True, "position_start": 1, "split_on": "comma"},
    },
    {"id": "off", "type": "local", "instance_data_dir": "off", "disabled": True},
    {"id": "text", "dataset_type": "text_embeds", "default": True, "type": "local", "cache_dir": "cache/text"},
]


@pytest.fixture
def simpletuner(load_text, tmp_path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/multi.json").write_text(json.dumps(BACKENDS))
    return load_text(SIMPLETUNER)


def test_a_simpletuner_job_is_read_whole(simpletuner, tmp_path):
    config = simpletuner.config
    train, optimizer = config.train, config.optimizer
    assert (train.batch_size, train.gradient_accumulation_steps, train.max_steps, train.num_epochs) == (
        4,
        2,
        1000,
        None,
    )
    assert (train.mixed_precision, train.gradient_checkpointing) == ("fp32", True)
    assert (optimizer.name, optimizer.learning_rate, optimizer.lr_scheduler) == ("adamw8bit", 1e-4, "constant")
    assert (config.run.seed, config.run.output_dir) == (42, tmp_path / "output")
    cache = config.cache_config
    assert (cache.cache_dir, cache.persistent_cache) == (tmp_path / "datasets/cache/vae", True)


def test_its_dataset_file_is_found_beside_the_config_and_its_paths_beside_itself(simpletuner, tmp_path):
    pictures, clips = simpletuner.config.datasets
    assert pictures.instance_data_dir == tmp_path / "datasets/pictures"
    assert (pictures.id, pictures.type, pictures.crop, pictures.weight) == ("my-pictures", "disk", "random", 0.5)
    assert pictures.max_aspect_ratio == 1.0
    assert (pictures.captions.source, pictures.captions.several) == ("sidecar", True)
    assert (clips.dataset_type, clips.frames) == ("video", (81,))
    assert (clips.captions.source, clips.captions.constant) == ("constant", "a clip")
    assert (clips.captions.shuffle_tags, clips.captions.keep_tags, clips.captions.tag_separator) == (True, 1, ",")
    assert simpletuner.attachments.keys() == {"multi.json"}


def test_simpletuner_counts_further_repeats_and_we_count_all(simpletuner):
    assert [d.repeats for d in simpletuner.config.datasets] == [1, 10]


def test_a_repeat_of_zero_in_our_own_names_is_refused_and_explained(refuse):
    (problem,) = refuse({"datasets": [{"repeats": 0}]})
    assert "SimpleTuner counts further repeats: its 0 is 1 here" in problem


def test_root_settings_reach_datasets_that_say_nothing_themselves(simpletuner):
    pictures, clips = simpletuner.config.datasets
    assert (pictures.resolution, clips.resolution) == ((1024,), (480,))
    assert [d.captions.dropout for d in simpletuner.config.datasets] == [0.1, 0.1]
    assert simpletuner.origins["datasets[0].resolution"] == "run.json: --resolution (SimpleTuner)"


def test_what_has_no_effect_is_said(simpletuner):
    said = {note.what: note.message for note in simpletuner.notes}
    assert "nothing is uploaded" in said["--push_to_hub"]
    assert said["multi.json: [2]"] == "is disabled and left out"
    assert "describes a cache" in said["multi.json: [3]"]
    assert "is read as cache_config.cache_dir" in said["multi.json: [0].cache_dir_vae"]


def test_an_error_in_the_dataset_file_names_that_file_and_the_name_written_there(refuse, tmp_path):
    (tmp_path / "multi.json").write_text('[{"id": "a", "probability": "often", "captoin_strategy": "textfile"}]')
    unknown, value = refuse({"data_backend_config": "multi.json"})
    assert unknown == "multi.json: [0].captoin_strategy: not a setting; did you mean caption_strategy?"
    assert value.startswith('datasets[0].weight: "often" is not allowed; allowed: a number above 0')
    assert value.endswith("(written as [0].probability in multi.json)")


def test_a_missing_dataset_file_is_an_error_at_its_key(refuse):
    (problem,) = refuse({"data_backend_config": "none.json"})
    assert problem.startswith("data_backend_config: there is no file")


def test_backends_that_cannot_be_read_are_refused_with_the_remedy(refuse):
    (problem,) = refuse({"data_backend": {"type": "aws", "id": "a"}})
    assert problem.startswith('data_backend.type: "aws" is not read here; fetch the files first')


def test_one_ramp_number_at_the_top_level_turns_the_ramp_on(load_text):
    tree = {"train_batch_size": 32, "initial_effective_batch_size": 4, "batch_rampup_steps": 10}
    ramp = load_text(tree).config.gh200_optimizations
    assert (ramp.enable_batch_size_rampup, ramp.initial_effective_batch_size, ramp.batch_rampup_steps) == (True, 4, 10)


def test_a_consequence_gives_way_to_the_setting_itself(load_text):
    tree = {"use_gh200_trainer": True, "gh200_optimizations": {"enable_uvm_hints": False}}
    assert load_text(tree).config.gh200_optimizations.enable_uvm_hints is False


AI_TOOLKIT = """
job: extension
config:
  name: my first lora
  process:
    - type: sd_trainer
      training_folder: output
      device: cuda:0
      trigger_word: p3r5on
      network: {type: lora, linear: 32, linear_alpha: 32}
      save: {dtype: float16, save_every: 250}
      datasets:
        - folder_path: pictures
          caption_ext: txt
          caption_dropout_rate: 0.05
          shuffle_tokens: true
          keep_tokens: 2
          num_repeats: 3
          resolution: [512, 768, 1024]
          flip_x: true
          cache_latents_to_disk: true
        - folder_path: clips
          num_frames: 41
          fps: 16
      train:
        batch_size: 2
        steps: 2000
        gradient_accumulation: 4
        gradient_checkpointing: true
        noise_scheduler: flowmatch
        optimizer: automagic
        lr: 1e-4
        optimizer_params: {weight_decay: 1e-4, high_noise_lr_bump: 1e-6}
        dtype: bf16
        cache_text_embeddings: true
      model: {name_or_path: some/model, arch: wan22_14b}
      sample: {sample_every: 250, prompts: [one, two]}
meta: {name: "[name]", version: '1.0'}
"""


def test_an_ai_toolkit_job_is_read_whole(load_text, tmp_path):
    config = load_text(AI_TOOLKIT, "job.yaml").config
    assert (config.run.name, config.run.output_dir) == ("my-first-lora", tmp_path / "output")
    train, optimizer, cache = config.train, config.optimizer, config.cache_config
    assert (train.batch_size, train.max_steps, train.gradient_accumulation_steps) == (2, 2000, 4)
    assert (train.mixed_precision, train.gradient_checkpointing) == ("bf16", True)
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("automagic", 1e-4, 1e-4)
    assert optimizer.high_noise_lr_bump == 1e-6
    assert (cache.vae_cache_type, cache.text_cache_type, cache.persistent_cache) == ("disk", "unified_memory", True)
    pictures, clips = config.datasets
    assert (pictures.instance_data_dir, pictures.repeats) == (tmp_path / "pictures", 3)
    assert (pictures.resolution, pictures.resolution_mode) == ((512, 768, 1024), "each")
    assert (pictures.augment.flip, pictures.captions.extension, pictures.captions.dropout) == (0.5, ".txt", 0.05)
    assert (pictures.captions.shuffle_tags, pictures.captions.keep_tags) == (True, 2)
    assert (clips.dataset_type, clips.frames, clips.fps) == ("video", (41,), 16)
    assert {d.captions.trigger_word for d in config.datasets} == {"p3r5on"}


def test_its_origins_carry_the_path_inside_the_job(load_text):
    origins = load_text(AI_TOOLKIT, "job.yaml").origins
    assert origins["optimizer.learning_rate"] == "job.yaml: config.process[0].train.lr (ai-toolkit)"
    assert origins["datasets[0].repeats"] == "job.yaml: config.process[0].datasets[0].num_repeats (ai-toolkit)"


@pytest.mark.parametrize(
    "keys", [("cache_latents", "cache_latents_to_disk"), ("cache_latents_to_disk", "cache_latents")]
)
def test_latents_asked_for_on_disk_and_in_memory_are_both_whatever_the_order(load_text, keys):
    cache = load_text({"dataset": {"folder_path": "a", **dict.fromkeys(keys, True)}}).config.cache_config
    assert (cache.vae_cache_type, cache.persistent_cache) == ("unified_memory", True)


@pytest.mark.parametrize("config", [5, {}, {"process": []}, {"process": [{}, {}]}, {"process": [1]}])
def test_a_job_that_is_not_one_process_is_refused(refuse, config):
    (problem,) = refuse({"job": "extension", "config": config})
    assert "is not a job of ai-toolkit" in problem


def test_bare_blocks_of_ai_toolkit_need_no_job_around_them(load_text):
    config = load_text("train: {steps: 5, lr: 1e-4}\ndataset: {folder_path: a, resolution: 512}", "run.yaml").config
    assert (config.train.max_steps, config.optimizer.learning_rate) == (5, 1e-4)
    assert config.datasets[0].resolution == (512,)


@pytest.mark.parametrize(
    ("tree", "one", "other"),
    [
        ({"train_batch_size": 4, "train": {"batch_size": 2}}, "train.batch_size", "train_batch_size"),
        ({"learning_rate": 1e-4, "train": {"lr": 1e-3}}, "train.lr", "learning_rate"),
        ({"datasets": [{"num_repeats": 2, "repeats": 3}]}, "datasets[0].repeats", "datasets[0].num_repeats"),
    ],
)
def test_two_names_of_one_setting_must_agree(refuse, load_text, tree, one, other):
    (problem,) = refuse(tree)
    assert problem.startswith(one)
    assert other in problem
    assert "keep one" in problem
    agreeing = json.loads(json.dumps(tree).replace("4,", "2,").replace("0.001", "0.0001").replace("3}", "2}"))
    load_text(agreeing)


def test_datasets_from_two_keys_are_refused(refuse):
    (problem,) = refuse({"datasets": [], "dataset": {"folder_path": "a"}})
    assert problem == "dataset: gives datasets, and so does datasets: keep one"


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"train": {"stesp": 5}}, "train.stesp: not a setting; did you mean steps?"),
        ({"network": {"linaer": 4}}, "network.linaer: not a setting; did you mean linear?"),
        (
            {"datasets": [{"video": {"num_frame": 4}}]},
            "datasets[0].video.num_frame: not a setting; did you mean num_frames?",
        ),
        ({"sample": 5}, "sample: 5 is not a block"),
    ],
)
def test_an_unknown_foreign_key_is_an_error_like_any_other(refuse, tree, says):
    (problem,) = refuse(tree)
    assert problem.startswith(says)


def test_every_row_of_the_table_leads_to_a_setting_or_says_why_not():
    samples = (True, False, 1, 4, 0.5, "a", "textfile", "square", "comma", "local", "area", "adamw", [512, 768])
    for scope, rows in (((), RUN_KEYS), (("datasets", 0), DATASET_KEYS)):
        for row in rows:
            if row.convert is None:
                assert row.ignored_reason, row
                continue
            block = {"caption_strategy": "instanceprompt", "instance_prompt": "x", row.key: 1}
            puts = [o for v in samples for o in row.convert(v, block) if hasattr(o, "target")]
            for put in puts:
                inner = key_paths.parse_path(put.target.removeprefix("^"))
                where = inner if put.target.startswith("^") else (*scope, *inner)
                assert key_paths.setting_at(where) is not None, (row.key, put.target)


def test_no_row_hides_a_setting_of_ours_unless_its_value_passes_unchanged():
    """A canonical file must mean the same with or without the table."""
    for row in dataset_keys("").values():
        if f"datasets[].{row.key}" in key_paths.settings():
            assert row.key in ("type", "crop"), row.key


def test_masks_and_regularisation_data_are_read_in_both_dialects(load_text, tmp_path):
    ours = load_text({"datasets": [{"folder_path": "a", "mask_path": "m", "mask_min_value": 0.2, "prior_reg": True}]})
    (dataset,) = ours.config.datasets
    assert (dataset.mask_dir, dataset.mask_floor, dataset.prior) == (tmp_path / "m", 0.2, True)
    (other,) = load_text({"datasets": [{"folder_path": "a", "mask_min_value": 0.2}]}).config.datasets
    assert (other.mask_dir, other.mask_floor) == (None, 0.0)
    (theirs,) = load_text({"data_backend": {"id": "a", "is_regularisation_data": True}}).config.datasets
    assert theirs.prior
