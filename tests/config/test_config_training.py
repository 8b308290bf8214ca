"""Training settings: contradictions are refused, unwise settings warn, and reserved words are not folders."""

from __future__ import annotations

from pathlib import Path

import pytest

WAN = {"family": "wan2.2", "path": "tiny"}
FLUX = {"family": "flux", "path": "tiny"}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model": {"path": "a/b"}}, "model.family: is missing: a model needs both"),
        ({"model": {"family": "wan22"}}, 'model.family: "wan22" is not allowed; allowed: one of "wan2.2", "flux"'),
        ({"model": {**FLUX, "experts": "low_noise"}}, 'model.experts: "low_noise" does not exist'),
        (
            {"model": {**FLUX, "single_file_low_noise": "a.safetensors"}},
            "model.single_file_low_noise: does not exist: a model of family",
        ),
        ({"model": {**WAN, "switch_boundary_every": 0}}, "model.switch_boundary_every: 0 is not allowed"),
        (
            {"model": {**WAN, "base_weights": "int8"}, "adapter": {"type": "full"}},
            'model.base_weights: "int8" needs frozen weights',
        ),
        ({"model": {**WAN, "base_weights": "int4"}}, 'did you mean "int8"?'),
        ({"adapter": {"targets": []}}, "adapter.targets: [] is not allowed; allowed: the name of a preset"),
        ({"adapter": {"type": "boft"}}, 'adapter.type: "boft" is not allowed; allowed: one of "lora", "locon", "loha"'),
        (
            {"adapter": {"type": "lokr", "dora": True}},
            'adapter.dora: needs type: "lora", not "lokr"',
        ),
        ({"adapter": {"type": "lokr", "lokr_factor": 0}}, "adapter.lokr_factor: is 0; it must be -1 or at least 1"),
        ({"adapter": {"modules": [{"match": ""}]}}, 'adapter.modules[0].match: "" is not allowed'),
        ({"adapter": {"modules": {"rank": 4}}}, 'adapter.modules: {"rank": 4} is not a list of blocks'),
        ({"adapter": {"modules": [4]}}, "adapter.modules[0]: 4 is not a block"),
        (
            {"adapter": {"modules": [{"match": "a", "rnk": 4}]}},
            "adapter.modules[0].rnk: not a setting; did you mean rank",
        ),
        (
            {"model": {**WAN, "base_weights": "int8"}, "adapter": {"dora": True}},
            'model.base_weights: "int8"',
        ),
        (
            {"model": {"family": "flux", "path": "x"}, "adapter": {"high_noise": {"rank": 4}}},
            'adapter.high_noise: does not exist: a model of family "flux" has one denoiser',
        ),
        ({"adapter": {"dropout": 1}}, "adapter.dropout: 1 is not allowed"),
        ({"objective": {"shift": 0}}, "objective.shift: 0 is not allowed; allowed: a number above 0"),
        ({"objective": {"shift": "autoo"}}, 'did you mean "auto"?'),
        ({"datasets": [{"held_out": True}, {"held_out": True}]}, "datasets[0].held_out: every dataset is held out"),
        ({"train": {"device": "cdua"}}, 'train.device: "cdua" is not allowed; allowed: "auto", or a device such as'),
        ({"train": {"ema_decay": 1}}, "train.ema_decay: 1 is not allowed"),
        ({"validation": {"width": 512}}, "validation.height: is missing: set width and height, or neither"),
        ({"validation": {"seeds": [1, 2, 1]}}, "validation.seeds: [1, 2, 1] contains a value twice"),
        ({"validation": {"held_out_levels": [0.5, 1]}}, "validation.held_out_levels[1]: 1 is not allowed"),
        ({"checkpoints": {"keep": 0}}, "checkpoints.keep: 0 is not allowed; allowed: a whole number of at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_path_value_and_remedy(refuse, tree, says):
    (problem,) = refuse(tree)
    assert says in problem


@pytest.mark.parametrize(
    ("tree", "setting", "says"),
    [
        (
            {"model": {**WAN, "experts": "high_noise", "switch_boundary_every": 10}},
            "model.switch_boundary_every",
            "one expert is trained",
        ),
        ({"model": {**FLUX, "switch_boundary_every": 10}}, "model.switch_boundary_every", "one expert is trained"),
        (
            {"model": FLUX, "optimizer": {"name": "automagic", "high_noise_lr_bump": 1e-6}},
            "optimizer.high_noise_lr_bump",
            'no effect: a model of family "flux" has one denoiser',
        ),
        (
            {"model": {**WAN, "experts": "low_noise"}, "adapter": {"high_noise": {"rank": 4}}},
            "adapter.high_noise",
            'no effect: this expert is not trained, model.experts is "low_noise"',
        ),
        (
            {"model": {**WAN, "experts": "high_noise"}, "optimizer": {"low_noise_lr": 1e-4}},
            "optimizer.low_noise_lr",
            "no effect: this expert is not trained",
        ),
        ({"model": {**WAN, "revision": "main"}}, "model.revision", "path is a model on this machine"),
        ({"model": {**WAN, "attention": "sage"}}, "model.attention", "computes no gradients"),
        ({"adapter": {"type": "full", "rank": 4}}, "adapter.rank", 'no effect with type: "full"'),
        ({"adapter": {"type": "diff", "alpha": 4}}, "adapter.alpha", 'no effect with type: "diff"'),
        ({"adapter": {"type": "loha", "lokr_factor": 4}}, "adapter.lokr_factor", 'without type: "lokr"'),
        ({"objective": {"timesteps": "uniform", "logit_std": 2}}, "objective.logit_std", "without timesteps"),
        ({"objective": {"snr_gamma": 5}}, "objective.snr_gamma", "without weighting"),
        ({"objective": {"flow_snr": "path"}}, "objective.flow_snr", "without weighting"),
        ({"objective": {"huber_delta": 1}}, "objective.huber_delta", "without loss"),
        ({"datasets": [{"mask_floor": 0.5}]}, "datasets[0].mask_floor", "no effect without mask_dir"),
        ({"datasets": [{}, {"prior": True, "held_out": True}]}, "datasets[1].prior", "the dataset is held out"),
        (
            {"optimizer": {"name": "schedule_free", "lr_scheduler": "cosine"}},
            "optimizer.lr_scheduler",
            '"cosine" conflicts with schedule_free',
        ),
        ({"optimizer": {"name": "prodigy", "learning_rate": 1e-4}}, "optimizer.learning_rate", "the usual value is 1"),
        (
            {"optimizer": {"name": "schedule_free"}, "train": {"ema_decay": 0.99}},
            "train.ema_decay",
            "schedule_free averages the weights too",
        ),
        ({"validation": {"prompts": ["a"]}}, "validation", "no effect without a model"),
        ({"cache_config": {"cache_dir": "a"}}, "cache_config.cache_dir", "while persistent_cache is false"),
        (
            {"cache_config": {"vae_cache_type": "none", "text_cache_type": "none", "persistent_cache": True}},
            "cache_config.persistent_cache",
            "there is no cache to keep",
        ),
        ({"datasets": [{"variations": 4}]}, "datasets[0].variations", "4 variations are identical"),
        (
            {
                "datasets": [{"crop": "random", "augmentations_cache_mode": "static"}],
                "cache_config": {"vae_cache_type": "none", "text_cache_type": "none"},
            },
            "datasets[0].augmentations_cache_mode",
            "no effect: cache_config turns all caches off",
        ),
    ],
)
def test_unwise_settings_produce_warnings(load_text, tree, setting, says):
    assert any(note.what == setting and says in note.message for note in load_text(tree).notes)


def test_consistent_settings_produce_no_notes(load_text, tmp_path):
    (tmp_path / "cats").mkdir()
    tree = {
        "model": {**WAN, "switch_boundary_every": 10, "base_weights": "fp8"},
        "adapter": {"rank": 32, "alpha": 16, "targets": ["to_q", "to_k"]},
        "objective": {"shift": 5, "logit_std": 2},
        "datasets": [
            {
                "instance_data_dir": "cats",
                "augment": {"flip": 0.5},
                "augmentations_cache_mode": "static",
                "variations": 2,
            }
        ],
        "optimizer": {"name": "prodigy", "learning_rate": 1.0, "lr_scheduler": "cosine"},
        "train": {"max_steps": 10, "num_epochs": 2, "ema_decay": 0.99},
        "validation": {"prompts": ["a cat"], "width": 512, "height": 512},
    }
    loaded = load_text(tree, check_paths=True)
    assert loaded.notes == ()
    assert loaded.config.adapter.targets == ("to_q", "to_k")
    assert (loaded.config.train.max_steps, loaded.config.train.num_epochs) == (10, 2)


def test_a_single_prompt_or_seed_is_a_list_of_one(load_text):
    tree = {"model": WAN, "validation": {"prompts": "a cat", "seeds": 7, "held_out_levels": 0.5}}
    validation = load_text(tree).config.validation
    assert (validation.prompts, validation.seeds, validation.held_out_levels) == (("a cat",), (7,), (0.5,))


def test_a_set_changes_entries_of_lists(load_text, refuse):
    tree = {"model": WAN, "validation": {"prompts": "a cat"}, "adapter": {"targets": ["to_q"]}}
    sets = ["validation.prompts[1]=7", "validation.seeds=[1, 2]", "adapter.targets[0]=to_k"]
    config = load_text(tree, sets=sets).config
    assert (config.validation.prompts, config.validation.seeds) == (("a cat", "7"), (1, 2))
    assert config.adapter.targets == ("to_k",)
    (problem,) = refuse(tree, sets=["train.batch_size[0]=1"])
    assert problem.startswith("train.batch_size")
    (problem,) = refuse(tree, sets=["train[0]=1"])
    assert "not a setting" in problem


@pytest.mark.parametrize("written", ["./model", "../here/model", "model"])
def test_the_folder_of_a_model_is_relative_to_the_file(load_text, tmp_path, written):
    (tmp_path / "model").mkdir()
    if written.startswith(".."):
        (tmp_path / "here").symlink_to(tmp_path)
        written = f"../{tmp_path.name}/model"
    loaded = load_text({"model": {"family": "flux", "path": written}}, check_paths=True)
    assert loaded.config.model.path == str(tmp_path / "model")


def test_a_name_on_the_hub_stays_a_name(load_text):
    name = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert load_text({"model": {"family": "wan2.2", "path": name}}, check_paths=True).config.model.path == name


@pytest.mark.parametrize(
    ("block", "key", "word"),
    [("model", "path", "tiny"), ("checkpoints", "resume", "latest"), ("checkpoints", "resume", "never")],
)
def test_a_reserved_word_is_not_taken_for_a_folder_of_that_name(load_text, tmp_path, block, key, word):
    (tmp_path / word).mkdir()
    tree = {"model": {"family": "flux"}, block: {"family": "flux", key: word} if block == "model" else {key: word}}
    assert getattr(getattr(load_text(tree).config, block), key) == word
    tree[block][key] = f"./{word}"
    assert getattr(getattr(load_text(tree).config, block), key) == str(tmp_path / word)


def test_missing_models_are_refused_with_the_path(refuse, tmp_path):
    (tmp_path / "one.safetensors").write_bytes(b"")
    (tmp_path / "one.bin").write_bytes(b"")
    problems = refuse(
        {"model": {"family": "flux", "path": "./none", "single_file": "one.bin"}},
        check_paths=True,
    )
    looked = f"looked in the folder of run.json and in the working folder {Path.cwd()}"
    assert problems == [
        f'model.path: "./none" is not a folder ({looked})',
        f'model.single_file: "one.bin" is not a .safetensors file ({looked})',
    ]
    (problem,) = refuse({"model": {"family": "flux", "path": "./one.safetensors"}}, check_paths=True)
    assert "set model.single_file to use a single file" in problem


def test_ranks_of_single_layers_come_from_the_file_and_from_sets(load_text):
    tree = {"adapter": {"modules": [{"match": "to_q", "rank": 8}, {"match": "to_v"}], "high_noise": {"rank": 32}}}
    sets = ["adapter.modules[1].alpha=4", "adapter.low_noise.targets=all_linear"]
    adapter = load_text({"model": WAN, **tree}, sets=sets).config.adapter
    assert [(entry.match, entry.rank, entry.alpha) for entry in adapter.modules] == [
        ("to_q", 8, None),
        ("to_v", None, 4.0),
    ]
    assert (adapter.high_noise.rank, adapter.low_noise.rank, adapter.low_noise.targets) == (32, None, "all_linear")


def test_adapter_files_are_relative_to_the_configuration(load_text, tmp_path):
    tree = {"adapter": {"start_from": "a.safetensors", "high_noise": {"frozen": "b.safetensors"}}}
    adapter = load_text({"model": WAN, **tree}).config.adapter
    assert (adapter.start_from, adapter.high_noise.frozen) == (tmp_path / "a.safetensors", tmp_path / "b.safetensors")


@pytest.mark.parametrize("block", ["adapter", "adapter.high_noise"])
def test_an_unknown_preset_of_adapter_targets_is_refused_before_the_model_is_read(refuse, block):
    tree = {"model": {"family": "wan2.2", "path": "tiny"}, "adapter": {"targets": "attentoin"}}
    if block != "adapter":
        tree["adapter"] = {"high_noise": tree["adapter"]}
    (problem,) = refuse(tree)
    assert problem.startswith(f'{block}.targets: "attentoin" is not a preset; use "attention", "attention_mlp", ')
    (problem,) = refuse({"model": {"family": "flux", "path": "tiny"}, "adapter": {"targets": "all_layers"}})
    assert '"all_layers" is not a preset' in problem
