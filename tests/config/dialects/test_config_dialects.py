"""Files of SimpleTuner and ai-toolkit have the same meaning here; keys without effect produce a note."""

from __future__ import annotations

import json

import pytest

from supertuner.config.dialects.conversions import SettingValue
from supertuner.config.dialects.key_tables import DATASET_KEYS, RUN_KEYS, dataset_keys
from supertuner.config.settings import key_paths
from supertuner.core.errors import ConfigError

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
    "--push_to_hub": "true",
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


def test_a_simpletuner_job_is_translated_completely(simpletuner, tmp_path):
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


def test_the_dataset_file_is_relative_to_the_config_and_its_paths_to_itself(simpletuner, tmp_path):
    pictures, clips = simpletuner.config.datasets
    assert pictures.instance_data_dir == tmp_path / "datasets/pictures"
    assert (pictures.id, pictures.type, pictures.crop, pictures.weight) == ("my-pictures", "disk", "random", 0.5)
    assert pictures.max_aspect_ratio == 1.0
    assert (pictures.captions.source, pictures.captions.several) == ("sidecar", True)
    assert (clips.dataset_type, clips.frames) == ("video", (81,))
    assert (clips.captions.source, clips.captions.constant) == ("constant", "a clip")
    assert (clips.captions.shuffle_tags, clips.captions.keep_tags, clips.captions.tag_separator) == (True, 1, ",")
    assert simpletuner.attachments.keys() == {"multi.json"}


def test_simpletuner_counts_additional_repeats_and_we_count_all(simpletuner):
    assert [d.repeats for d in simpletuner.config.datasets] == [1, 10]


def test_zero_repeats_under_our_own_name_is_refused_and_explained(refuse):
    (problem,) = refuse({"datasets": [{"repeats": 0}]})
    assert "SimpleTuner counts additional repeats: its 0 is 1 here" in problem


def test_root_keys_apply_to_datasets_that_do_not_set_them(simpletuner):
    pictures, clips = simpletuner.config.datasets
    assert (pictures.resolution, clips.resolution) == ((1024,), (480,))
    assert [d.captions.dropout for d in simpletuner.config.datasets] == [0.1, 0.1]
    assert simpletuner.origins["datasets[0].resolution"] == "run.json: --resolution (SimpleTuner)"


def test_keys_without_effect_produce_notes(simpletuner):
    notes = {note.what: note.message for note in simpletuner.notes}
    assert "hub_model_id does not name a repository as OWNER/NAME" in notes["--push_to_hub"]
    assert simpletuner.config.exports.push_to_hub is None
    assert notes["multi.json: [2]"] == "is disabled and not used"
    assert "describes a cache" in notes["multi.json: [3]"]
    assert "cache_config.cache_dir" in notes["multi.json: [0].cache_dir_vae"]


def test_an_error_in_the_dataset_file_names_that_file_and_its_key(refuse, tmp_path):
    (tmp_path / "multi.json").write_text('[{"id": "a", "probability": "often", "captoin_strategy": "textfile"}]')
    value, unknown = refuse({"data_backend_config": "multi.json"})
    assert unknown == "multi.json: [0].captoin_strategy: not a setting; did you mean caption_strategy?"
    assert value.startswith('datasets[0].weight: "often" is not allowed; allowed: a number above 0')
    assert value.endswith("(written as [0].probability in multi.json)")


def test_a_missing_dataset_file_is_an_error_at_its_key(refuse):
    (problem,) = refuse({"data_backend_config": "none.json"})
    assert problem.startswith('data_backend_config: "none.json" does not exist; looked for ')


def test_a_key_without_meaning_here_that_asks_for_nothing_produces_no_note(load_text):
    asking = {"push_to_hub": True, "controlnet": False, "ramtorch": True, "validation_guidance_rescale": 0.7}
    silent = {"push_to_hub": False, "controlnet": False, "ramtorch": "false", "validation_guidance_rescale": "0.0"}
    assert [note.what for note in load_text(asking).notes] == ["push_to_hub", "ramtorch", "validation_guidance_rescale"]
    assert load_text(silent).notes == ()


def test_switches_that_push_name_the_repository_by_another_key(load_text, refuse):
    simpletuner = {"--push_to_hub": "true", "--hub_model_id": "someone/lora", "model_card_private": False}
    ai_toolkit = {"save": {"push_to_hub": True, "hf_repo_id": "someone/lora", "hf_private": False}}
    for tree in (simpletuner, ai_toolkit):
        loaded = load_text(tree)
        exports = loaded.config.exports
        assert (exports.push_to_hub, exports.hub_private, loaded.notes) == ("someone/lora", False, ())
    off = load_text({"push_to_hub": False, "hub_model_id": "someone/lora"})
    assert off.config.exports.push_to_hub is None and off.notes == ()
    (note,) = load_text({"hub_model_id": "someone/lora"}).notes
    assert note.message == "has no effect without push_to_hub"
    assert "once, when training ends" in load_text({"push_checkpoints_to_hub": True}).notes[0].message


def test_a_token_in_a_file_is_refused_and_not_shown(refuse):
    token = "hf_ThisIsASecretThatNobodyMayEverSee12"
    (problem,) = refuse({"hub_token": token})
    assert "run `hf auth login` or set HF_TOKEN" in problem and token not in problem
    (problem,) = refuse({"exports": {"push_to_hub": token}})
    assert '"hf_(token removed)" is not allowed; allowed: OWNER/NAME' in problem


def test_a_key_that_would_train_something_else_is_refused(refuse, load_text):
    assert "ControlNets and control channels are not trained here" in refuse({"controlnet": True})[0]
    assert "distillation is not trained here" in refuse({"distillation_method": "lcm"})[0]
    job = "config: {process: [{type: slider, adapter: {type: ip}, model: {name_or_path: a/b, arch: flux}}]}"
    adapter, process = sorted(refuse(job, "job.yaml"))
    assert adapter.startswith("config.process[0].adapter: ai-toolkit's adapter block is not available")
    assert process.startswith('config.process[0].type: process "slider" of ai-toolkit is not available here yet')
    assert not load_text({"distillation_method": None, "twinflow_enabled": False}).notes


def test_a_key_that_acts_approximately_has_a_note_that_says_how(load_text):
    (note,) = load_text({"train": {"snr_gamma": 5.0}}).notes
    assert (note.what, "here the weight is at most 1" in note.message) == ("train.snr_gamma", True)
    assert load_text({"train": {"snr_gamma": None}}).notes == ()


def test_notes_stand_beside_errors_in_the_order_of_the_file(tmp_path, load_text):
    (tmp_path / "multi.json").write_text('[{"id": "a", "crop": false, "captoin_strategy": "textfile"}]')
    tree = {
        "ramtorch": True,
        "learning_rate": "fast",
        "model_card_note": "a",
        "data_backend_config": "multi.json",
        "model_famly": "flux",
        "model_card_safe_for_work": True,
    }
    with pytest.raises(ConfigError) as caught:
        load_text(tree)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in lines[1:5]] == [
        ["  note", "ramtorch"],
        ["  error", "optimizer.learning_rate"],
        ["  note", "model_card_note, model_card_safe_for_work"],
        ["  error", "model_famly"],
    ]
    assert lines[5].startswith("  note: multi.json: [0].crop: ")
    assert lines[6].startswith("  error: multi.json: [0].captoin_strategy: not a setting; did you mean caption_strat")
    assert lines[7] == "3 errors; nothing was started"
    assert [note.path for note in caught.value.notes] == [
        "ramtorch",
        "model_card_note, model_card_safe_for_work",
        "multi.json: [0].crop",
    ]


def test_a_file_names_the_defaults_of_its_program_that_differ_here(load_text):
    tree = {"model_family": "sdxl", "learning_rate": 1e-4, "train_batch_size": 2, "max_grad_norm": 1.0}
    (note,) = [note for note in load_text(tree).notes if note.what == "defaults"]
    assert note.message.endswith("set train.gradient_checkpointing true, adapter.dropout 0.1")
    (note,) = [note for note in load_text({"model_family": "flux"}).notes if note.what == "defaults"]
    assert "train.max_grad_value 2.0" in note.message and "objective.shift 3.0" in note.message
    complete = {**tree, "gradient_checkpointing": True, "lora_dropout": 0.1}
    assert not [note for note in load_text(complete).notes if note.what == "defaults"]
    assert load_text({"train": {"lr": 1e-4}}).notes == ()


def test_backends_that_are_not_supported_are_refused_with_the_remedy(refuse):
    (problem,) = refuse({"data_backend": {"type": "aws", "id": "a"}})
    assert problem.startswith('data_backend.type: "aws" is not supported; download the files')


def test_a_ramp_setting_at_the_top_level_turns_the_ramp_on(load_text):
    tree = {"train_batch_size": 32, "initial_effective_batch_size": 4, "batch_rampup_steps": 10}
    ramp = load_text(tree).config.gh200_optimizations
    assert (ramp.enable_batch_size_rampup, ramp.initial_effective_batch_size, ramp.batch_rampup_steps) == (True, 4, 10)


def test_an_implied_value_is_overridden_by_the_setting_itself(load_text):
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


def test_an_ai_toolkit_job_is_translated_completely(load_text, tmp_path):
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


def test_origins_contain_the_path_inside_the_job(load_text):
    origins = load_text(AI_TOOLKIT, "job.yaml").origins
    assert origins["optimizer.learning_rate"] == "job.yaml: config.process[0].train.lr (ai-toolkit)"
    assert origins["datasets[0].repeats"] == "job.yaml: config.process[0].datasets[0].num_repeats (ai-toolkit)"


@pytest.mark.parametrize(
    "keys", [("cache_latents", "cache_latents_to_disk"), ("cache_latents_to_disk", "cache_latents")]
)
def test_latents_cached_on_disk_and_in_memory_do_not_depend_on_the_order_of_keys(load_text, keys):
    cache = load_text({"dataset": {"folder_path": "a", **dict.fromkeys(keys, True)}}).config.cache_config
    assert (cache.vae_cache_type, cache.persistent_cache) == ("unified_memory", True)


@pytest.mark.parametrize("config", [5, {}, {"process": []}, {"process": [{}, {}]}, {"process": [1]}])
def test_a_job_without_exactly_one_process_is_refused(refuse, config):
    (problem,) = refuse({"job": "extension", "config": config})
    assert "is not a job of ai-toolkit" in problem


def test_blocks_of_ai_toolkit_need_no_surrounding_job(load_text):
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
    assert "remove one" in problem
    agreeing = json.loads(json.dumps(tree).replace("4,", "2,").replace("0.001", "0.0001").replace("3}", "2}"))
    load_text(agreeing)


def test_datasets_from_two_keys_are_refused(refuse):
    (problem,) = refuse({"datasets": [], "dataset": {"folder_path": "a"}})
    assert problem == "dataset: sets the datasets, and so does datasets: remove one"


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
def test_an_unknown_key_in_a_block_of_a_dialect_is_an_error(refuse, tree, says):
    (problem,) = refuse(tree)
    assert problem.startswith(says)


def test_every_row_of_the_tables_sets_an_existing_setting_or_has_a_reason():
    samples = (True, False, 1, 4, 0.5, "a", "textfile", "square", "comma", "local", "area", "adamw", [512, 768])
    for scope, rows in (((), RUN_KEYS), (("datasets", 0), DATASET_KEYS)):
        for row in rows:
            if row.convert is None:
                assert row.reason, row
                continue
            block = {"caption_strategy": "instanceprompt", "instance_prompt": "x", row.key: 1}
            targets = [o.target for v in samples for o in row.convert(v, block) if isinstance(o, SettingValue)]
            for target in targets:
                inner = key_paths.parse_path(target.removeprefix("^"))
                key_path = inner if target.startswith("^") else (*scope, *inner)
                assert key_paths.setting_at(key_path) is not None, (row.key, target)


def test_no_row_of_a_dialect_shadows_a_setting_of_ours():
    """A file under our own names has the same meaning with and without the tables."""
    for row in dataset_keys("").values():
        if f"datasets[].{row.key}" in key_paths.settings():
            assert row.key in ("type", "crop"), row.key


def test_masks_and_regularisation_data_of_both_dialects_are_translated(load_text, tmp_path):
    ours = load_text({"datasets": [{"folder_path": "a", "mask_path": "m", "mask_min_value": 0.2, "prior_reg": True}]})
    (dataset,) = ours.config.datasets
    assert (dataset.mask_dir, dataset.mask_floor, dataset.prior) == (tmp_path / "m", 0.2, True)
    (other,) = load_text({"datasets": [{"folder_path": "a", "mask_min_value": 0.2}]}).config.datasets
    assert (other.mask_dir, other.mask_floor) == (None, 0.0)
    (theirs,) = load_text({"data_backend": {"id": "a", "is_regularisation_data": True}}).config.datasets
    assert theirs.prior


@pytest.mark.parametrize(
    ("tree", "key", "remedies"),
    [
        (
            {"data_backend": {"id": "a", "conditioning_data": "b"}},
            "conditioning_data",
            ("conditioning_dir", "mask_dir"),
        ),
        ({"datasets": [{"folder_path": "a", "alpha_mask": True}]}, "alpha_mask", ("mask_dir",)),
        ({"datasets": [{"folder_path": "a", "network_weight": 0.5}]}, "network_weight", ("loss_weight",)),
        ({"enable_group_offload": True}, "enable_group_offload", ("the plan moves weights", "plan.weights")),
        ({"model": {"low_vram": True}}, "low_vram", ("the plan moves weights", "plan.weights")),
    ],
)
def test_keys_of_features_with_other_settings_name_those_settings(load_text, tree, key, remedies):
    (message,) = [note.message for note in load_text(tree).notes if note.what.endswith(key)]
    assert all(remedy in message for remedy in remedies)


def test_a_conditioning_dataset_is_refused_with_the_settings_to_use(refuse):
    (problem,) = refuse({"data_backend": {"id": "a", "dataset_type": "conditioning"}})
    assert "conditioning_dir (reference images) or mask_dir (masks)" in problem
