"""Keys of SimpleTuner and ai-toolkit about models, adapters, checkpoints, samples and reports are translated."""

from __future__ import annotations

import json

import pytest

SIMPLETUNER = {
    "--model_type": "lora",
    "--model_family": "flux",
    "--model_flavour": "dev",
    "--pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "--revision": "main",
    "--variant": "bf16",
    "--base_model_precision": "int8-quanto",
    "--attention_mechanism": "flash-attn-3",
    "--dynamo_backend": "inductor",
    "--lora_type": "standard",
    "--lora_rank": "32",
    "--lora_alpha": 16,
    "--lora_dropout": 0.1,
    "--flow_schedule_shift": 3,
    "--use_ema": "true",
    "--ema_decay": 0.99,
    "--checkpoint_step_interval": 250,
    "--checkpoints_total_limit": 5,
    "--resume_from_checkpoint": "latest",
    "--validation_prompt": "a cat",
    "--validation_negative_prompt": "blurry",
    "--validation_seed": 42,
    "--num_validation_images": 2,
    "--validation_step_interval": 100,
    "--validation_resolution": "1024x576,512x512",
    "--validation_guidance": 3.5,
    "--validation_num_inference_steps": 20,
    "--disable_benchmark": "true",
    "--report_to": "wandb",
    "--tracker_project_name": "cats",
}


def test_training_keys_of_a_simpletuner_file_are_translated(load_text):
    config = load_text(SIMPLETUNER).config
    model, adapter = config.model, config.adapter
    assert (model.family, model.path, model.revision) == ("flux", "black-forest-labs/FLUX.1-dev", "main")
    assert (model.variant, model.base_weights, model.attention, model.compile) == ("bf16", "int8", "_flash_3", True)
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 32, 16, 0.1)
    assert (config.objective.shift, config.train.ema_decay) == (3, 0.99)
    checkpoints = config.checkpoints
    assert (checkpoints.every_steps, checkpoints.keep, checkpoints.resume) == (250, 5, "latest")
    assert (config.report.tensorboard, config.report.wandb) == (False, "cats")


def test_validation_keys_of_a_simpletuner_file_are_translated(load_text):
    loaded = load_text(SIMPLETUNER)
    validation = loaded.config.validation
    assert (validation.prompts, validation.negative_prompt, validation.seeds) == (("a cat",), "blurry", (42, 43))
    assert (validation.every_steps, validation.at_start, validation.at_end) == (100, False, True)
    assert (validation.width, validation.height) == (1024, 576)
    assert (validation.guidance_scale, validation.inference_steps) == (3.5, 20)
    notes = {note.what: note.message for note in loaded.notes}
    assert notes["--validation_resolution"] == "only the first size is used: 1024 × 576"
    assert notes["--base_model_precision"] == "torchao quantizes the weights, not quanto"


def settings(config) -> dict[str, object]:
    """The settings of these blocks that are not defaults, as one flat table."""
    blocks = ("model", "adapter", "objective", "train", "checkpoints", "validation", "report")
    return {
        f"{name}.{key}": value
        for name in blocks
        for key, value in getattr(config, name).model_dump(exclude_unset=True).items()
    }


WAN22 = {"model_family": "wan", "model_flavour": "i2v-14b-2.2-high"}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            WAN22,
            {
                "model.family": "wan2.2",
                "model.path": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
                "model.experts": "high_noise",
            },
        ),
        (
            {"model_family": "wan", "pretrained_model_name_or_path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"},
            {"model.family": "wan2.2", "model.path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers"},
        ),
        (
            {**WAN22, "pretrained_model_name_or_path": "me/mine"},
            {"model.family": "wan2.2", "model.path": "me/mine", "model.experts": "high_noise"},
        ),
        (
            {"model_family": "flux", "model_flavour": "schnell"},
            {"model.family": "flux", "model.path": "black-forest-labs/FLUX.1-schnell"},
        ),
        (
            {"model_family": "qwen_image", "model_flavour": "v1.0"},
            {"model.family": "qwen-image", "model.path": "Qwen/Qwen-Image"},
        ),
        (
            {"model_family": "qwen_image", "model_flavour": "edit-v1"},
            {"model.family": "qwen-image-edit", "model.path": "Qwen/Qwen-Image-Edit"},
        ),
        (
            {"model_family": "wan", "model_type": "full"},
            {
                "model.family": "wan2.2",
                "model.path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
                "adapter.type": "full",
            },
        ),
        ({"flow_schedule_shift": 0}, {"objective.shift": 1.0}),
        ({"flow_schedule_shift": 3, "flow_schedule_auto_shift": True}, {"objective.shift": "auto"}),
        ({"flow_use_uniform_schedule": True}, {"objective.timesteps": "uniform"}),
        ({"flow_sigmoid_scale": 0.5}, {"objective.logit_std": 0.5}),
        ({"snr_gamma": 5}, {"objective.weighting": "min_snr", "objective.snr_gamma": 5}),
        ({"snr_gamma": 0}, {}),
        ({"loss_type": "l2", "huber_c": 0.1, "huber_schedule": "snr"}, {"objective.loss": "mse"}),
        ({"loss_type": "huber", "huber_c": 0.2}, {"objective.loss": "huber", "objective.huber_delta": 0.2}),
        ({"use_ema": True}, {"train.ema_decay": 0.995}),
        ({"use_ema": False, "ema_decay": 0.9}, {}),
        ({"base_model_precision": "no_change"}, {}),
        ({"base_model_precision": "fp8-torchao"}, {"model.base_weights": "fp8"}),
        ({"attention_mechanism": "diffusers"}, {"model.attention": "native"}),
        ({"attention_mechanism": "flash-attn"}, {"model.attention": "flash"}),
        ({"attention_mechanism": "sageattention"}, {}),
        ({"dynamo_backend": "no"}, {}),
        ({"checkpointing_steps": 10}, {"checkpoints.every_steps": 10}),
        ({"checkpoints_total_limit": None, "resume_from_checkpoint": None}, {}),
        ({"validation_resolution": 512}, {"validation.width": 512, "validation.height": 512}),
        ({"validation_resolution": "1.0"}, {"validation.width": 1024, "validation.height": 1024}),
        (
            {"validation_disable": True, "validation_step_interval": 50},
            {"validation.at_start": False, "validation.at_end": False, "validation.every_steps": None},
        ),
        ({"validation_on_startup": True, "disable_benchmark": True}, {"validation.at_start": True}),
        ({"num_validation_images": 3}, {"validation.seeds": (0, 1, 2)}),
        ({"report_to": "none"}, {"report.tensorboard": False}),
        (
            {"model_family": "sd3", "model_flavour": "large"},
            {"model.family": "sd3.5", "model.path": "stabilityai/stable-diffusion-3.5-large"},
        ),
        (
            {"model_family": "sdxl"},
            {"model.family": "sdxl", "model.path": "stabilityai/stable-diffusion-xl-base-1.0"},
        ),
        ({"report_to": "tensorboard"}, {"report.tensorboard": True}),
        ({"report_to": "tensorboard, wandb"}, {"report.tensorboard": True, "report.wandb": "simpletuner"}),
    ],
)
def test_single_keys_of_simpletuner(load_text, tree, expected):
    assert settings(load_text(tree).config) == expected


@pytest.mark.parametrize(
    ("tree", "place", "says"),
    [
        ({"model_family": "sd1x"}, "model_family", '"sd1x" is not supported'),
        ({"model_family": "sdxl", "model_flavour": "refiner-1.0"}, "model_flavour", "is not supported"),
        ({"model_family": "wan", "model_flavour": "vace-14b-2.1"}, "model_family", "is not supported"),
        (
            {"model_family": "flux"},
            "model_family",
            "no model is given; uses SimpleTuner's default, black-forest-labs/FLUX.1-dev",
        ),
        ({"model_family": "qwen_image", "model_flavour": "edit-v2"}, "model_flavour", "is not supported"),
        ({"model_family": "flux", "model_flavour": "kontext"}, "model_flavour", "is not supported"),
        ({"ema_decay": 0.9}, "ema_decay", "use_ema is not true"),
        ({"report_to": "comet_ml"}, "report_to", "comet_ml is not available"),
        ({"tracker_project_name": "a"}, "tracker_project_name", "nothing is reported to wandb"),
        ({"base_model_precision": "int4-quanto"}, "base_model_precision", "int8 is used"),
        ({"attention_mechanism": "sageattention"}, "attention_mechanism", "no backward pass"),
        ({"lycoris_config": "a.json"}, "lycoris_config", 'only with lora_type: "lycoris"'),
        ({"ramtorch": True}, "ramtorch", "the plan moves weights"),
    ],
)
def test_unsupported_keys_of_simpletuner_produce_notes(load_text, tree, place, says):
    loaded = load_text(tree)
    assert any(note.what == place and says in note.message for note in loaded.notes)
    assert loaded.config.model.family in (None, "flux")


def test_a_model_of_an_unsupported_family_is_not_loaded(load_text):
    tree = {"model_family": "pixart_sigma", "pretrained_model_name_or_path": "owner/name"}
    model = load_text(tree).config.model
    assert (model.family, model.path) == (None, None)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model_family": "fulx"}, 'model_family: "fulx" is not a known family'),
        ({"model_family": "flux", "model_flavour": "devv"}, 'model_flavour: "devv" is not a known flavour'),
        (
            {"model_family": "flux", "pretrained_model_name_or_path": "flux.safetensors"},
            "pretrained_model_name_or_path: ",
        ),
        ({"pretrained_model_name_or_path": "a/b"}, "model.family: is missing"),
        ({"lora_type": "lycoris"}, 'lora_type: "lycoris" needs lycoris_config'),
        ({"lora_type": "lycoris", "lycoris_config": "no.json"}, "lycoris_config: there is no file"),
        ({"lora_type": "lora"}, 'lora_type: "lora" is not available; allowed: "standard", "lycoris"'),
        ({"base_model_precision": "int9"}, 'base_model_precision: "int9" is not a known format'),
        ({"attention_mechanism": "flsh"}, 'attention_mechanism: "flsh" is not available; allowed: "diffusers"'),
        ({"validation_resolution": "big"}, 'validation_resolution: "big" is not a size'),
        ({"use_ema": "maybe"}, 'use_ema: "maybe" is not true or false'),
        (
            {"num_validation_images": 1000},
            "num_validation_images: 1000 is not valid: validation_seed is a whole number",
        ),
        ({"validation_steps": 5, "validation_step_interval": 6}, "remove one"),
    ],
)
def test_invalid_values_of_simpletuner_keys_are_refused(refuse, tree, says):
    (problem,) = refuse(tree)
    assert says in problem


AI_TOOLKIT = """
job: extension
config:
  name: my_first_wan22_14b_lora_v1
  process:
    - type: sd_trainer
      training_folder: output
      device: cuda:0
      network: {type: lora, linear: 32, linear_alpha: 16, dropout: 0.1}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - {folder_path: pictures, num_frames: 1}
      train:
        steps: 2000
        lr: 1e-4
        optimizer: adamw8bit
        timestep_type: linear
        noise_scheduler: flowmatch
        switch_boundary_every: 10
        skip_first_sample: true
        ema_config: {use_ema: true, ema_decay: 0.99}
      model:
        name_or_path: ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16
        arch: 'wan22_14b:t2v'
        quantize: true
        qtype: qint8
        low_vram: true
        model_kwargs: {train_high_noise: true, train_low_noise: false}
      sample:
        sampler: flowmatch
        sample_every: 250
        width: 832
        height: 480
        num_frames: 41
        fps: 16
        prompts: ["[trigger] in a park", a bear]
        neg: ""
        seed: 42
        walk_seed: true
        guidance_scale: 3.5
        sample_steps: 25
      logging: {log_every: 10, use_wandb: true, project_name: bears}
"""


def test_training_keys_of_an_ai_toolkit_job_are_translated(load_text):
    loaded = load_text(AI_TOOLKIT, "job.yaml")
    config = loaded.config
    model, adapter = config.model, config.adapter
    assert (model.family, model.path) == ("wan2.2", "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16")
    assert (model.experts, model.switch_boundary_every, model.base_weights) == ("high_noise", 10, "int8")
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 32, 16, 0.1)
    assert adapter.targets == "attention_mlp"
    assert (config.objective.timesteps, config.objective.shift) == ("uniform", 1.0)
    assert (config.train.ema_decay, config.train.device) == (0.99, "cuda:0")
    assert (config.checkpoints.every_steps, config.checkpoints.keep) == (250, 4)
    assert (config.report.wandb, config.report.every_steps) == ("bears", 10)
    notes = {note.what.removeprefix("config.process[0]."): note.message for note in loaded.notes}
    assert "[trigger] is not replaced" in notes["sample.prompts"]
    assert "plan.weights" in notes["model.low_vram"]


def test_sample_keys_of_an_ai_toolkit_job_are_translated(load_text):
    validation = load_text(AI_TOOLKIT, "job.yaml").config.validation
    assert (validation.every_steps, validation.at_start) == (250, False)
    assert (validation.width, validation.height, validation.frames, validation.fps) == (832, 480, 41, 16)
    assert (validation.prompts, validation.seeds) == (("[trigger] in a park", "a bear"), (42,))
    assert (validation.guidance_scale, validation.inference_steps) == (3.5, 25)


def test_a_job_without_a_network_trains_all_weights_as_in_ai_toolkit(load_text):
    job = "config: {process: [{model: {name_or_path: a/b, arch: flux}, train: {steps: 3}}]}"
    loaded = load_text(job, "job.yaml")
    assert loaded.config.adapter.type == "full"
    assert any("all weights are trained" in note.message for note in loaded.notes)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            {"model": {"name_or_path": "a/b", "is_flux": True}},
            {"model.family": "flux", "model.path": "a/b"},
        ),
        ({"model": {"arch": "wan22_5b"}}, {"model.family": "wan2.2"}),
        ({"model": {"name_or_path": "a/b", "is_xl": True}}, {"model.family": "sdxl", "model.path": "a/b"}),
        ({"model": {"name_or_path": "a/b", "arch": "sd3"}}, {"model.family": "sd3.5", "model.path": "a/b"}),
        ({"model": {"quantize": True}}, {"model.base_weights": "fp8"}),
        ({"model": {"quantize": False, "qtype": "qfloat8"}}, {}),
        ({"model": {"model_kwargs": {"train_high_noise": False}}}, {"model.experts": "low_noise"}),
        (
            {"model": {"model_kwargs": {"train_high_noise": True, "train_low_noise": True}}},
            {"model.experts": "all"},
        ),
        ({"network": {"rank": 8, "alpha": 4}}, {"adapter.rank": 8, "adapter.alpha": 4}),
        (
            {"network": {"type": "lokr", "lokr_factor": 8, "lokr_full_rank": True}},
            {
                "adapter.type": "lokr",
                "adapter.targets": "attention_mlp",
                "adapter.lokr_factor": 8,
                "adapter.lokr_full_matrix": True,
            },
        ),
        (
            {"network": {"type": "dora"}},
            {"adapter.type": "lora", "adapter.targets": "attention_mlp", "adapter.dora": True},
        ),
        (
            {"train": {"timestep_type": "sigmoid"}},
            {"objective.timesteps": "logit_normal", "objective.shift": 1.0},
        ),
        ({"train": {"min_snr_gamma": 4}}, {"objective.weighting": "min_snr", "objective.snr_gamma": 4}),
        ({"train": {"snr_gamma": 4}}, {"objective.weighting": "min_snr", "objective.snr_gamma": 4}),
        ({"train": {"snr_gamma": None, "loss_type": "mse"}}, {"objective.loss": "mse"}),
        ({"train": {"ema_config": {"ema_decay": 0.9}}}, {"train.ema_decay": 0.9}),
        ({"train": {"ema_config": {"use_ema": False, "ema_decay": 0.9}}}, {}),
        ({"train": {"ema_config": None}}, {}),
        ({"sample": {"sample_every": 5}}, {"validation.every_steps": 5, "validation.at_start": True}),
        (
            {"sample": {"sample_every": 5}, "train": {"disable_sampling": True}},
            {"validation.every_steps": None, "validation.at_start": False, "validation.at_end": False},
        ),
        ({"sample": {"samples": [{"prompt": "a"}, {"prompt": "b"}]}}, {"validation.prompts": ("a", "b")}),
        ({"logging": {"use_wandb": False, "project_name": "a"}}, {}),
    ],
)
def test_single_keys_of_ai_toolkit(load_text, tree, expected):
    assert settings(load_text(tree).config) == expected


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model": {"arch": "wan23"}}, 'model.arch: "wan23" is not a known architecture; supported: "wan22_14b"'),
        ({"model": {"quantize": True, "qtype": "q9"}}, 'model.quantize: "q9" is not a known format'),
        (
            {"model": {"model_kwargs": {"train_low_nois": True}}},
            "model.model_kwargs.train_low_nois: not a setting; did you mean train_low_noise?",
        ),
        ({"network": {"type": "lorm"}}, 'network.type: "lorm" is not available; allowed: "lora", "dora"'),
        ({"train": {"timestep_type": "sigmiod"}}, 'train.timestep_type: "sigmiod" is not available'),
        ({"train": {"ema_config": 5}}, "train.ema_config: 5 is not a block"),
        ({"sample": {"prompts": "a"}}, 'sample.prompts: "a" is not a list of prompts'),
        ({"sample": {"samples": ["a"]}}, "sample.samples: "),
        ({"device": "gpu"}, 'train.device: "gpu" is not allowed'),
    ],
)
def test_invalid_values_of_ai_toolkit_keys_are_refused(refuse, tree, says):
    (problem,) = refuse(tree)
    assert problem.startswith(says)


def test_two_experts_that_are_both_not_trained_are_refused(refuse):
    problems = refuse({"model": {"model_kwargs": {"train_high_noise": False, "train_low_noise": False}}})
    assert len(problems) == 2
    assert all("there is nothing to train" in problem for problem in problems)


@pytest.mark.parametrize("arch", ["hidream", "wan21_i2v:14b", "flux_kontext"])
def test_a_model_of_an_unsupported_architecture_is_not_loaded(load_text, arch):
    loaded = load_text({"model": {"arch": arch, "name_or_path": "a/b"}})
    assert (loaded.config.model.family, loaded.config.model.path) == (None, None)
    assert any(note.what == "model.arch" and "is not supported" in note.message for note in loaded.notes)


def test_simpletuners_init_lora_sets_the_initial_adapter(tmp_path, load_text):
    assert load_text({"init_lora": "a.safetensors"}).config.adapter.start_from == tmp_path / "a.safetensors"


LYCORIS = {
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 16,
    "apply_preset": {"target_module": ["Attention", "FeedForward"], "module_algo_map": {"Attention": {"factor": 16}}},
}


def lycoris(tmp_path, load_text, **changed):
    (tmp_path / "lycoris.json").write_text(json.dumps({**LYCORIS, **changed}))
    return load_text({"model_type": "lora", "lora_type": "lycoris", "lycoris_config": "lycoris.json"})


def test_simpletuners_lycoris_file_is_translated(tmp_path, load_text):
    loaded = lycoris(tmp_path, load_text)
    assert settings(loaded.config) == {
        "adapter.type": "lokr",
        "adapter.lokr_full_matrix": True,
        "adapter.alpha": 1,
        "adapter.lokr_factor": 16,
        "adapter.targets": "attention_mlp",
    }
    (note,) = [note for note in loaded.notes if "lycoris.json" in note.what and "module_algo_map" in note.what]
    assert "adapter.modules for their ranks" in note.message


def test_a_lycoris_file_of_another_algorithm(tmp_path, load_text):
    adapter = lycoris(tmp_path, load_text, algo="loha", linear_dim=8, rs_lora=True, dropout=0.1).config.adapter
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.rslora, adapter.dropout) == ("loha", 8, 1.0, True, 0.1)
    assert lycoris(tmp_path, load_text, algo="full").config.adapter.type == "diff"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"algo": "boft"}, 'lycoris.json: algo: "boft" is not available; allowed: "lora", "locon"'),
        ({"multiplier": 2.0}, "lycoris.json: multiplier: 2.0 is not available"),
        ({"dora_wd": True}, "lycoris.json: dora_wd: is not available for LyCORIS"),
    ],
)
def test_unsupported_options_of_a_lycoris_file_are_refused(tmp_path, refuse, changed, says):
    (tmp_path / "lycoris.json").write_text(json.dumps({**LYCORIS, **changed}))
    problems = refuse({"model_type": "lora", "lora_type": "lycoris", "lycoris_config": "lycoris.json"})
    assert any(says in problem for problem in problems)
