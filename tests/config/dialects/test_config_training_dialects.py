"""Keys of SimpleTuner and ai-toolkit about models, adapters, checkpoints, samples and reports are translated."""

from __future__ import annotations

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
    blocks = (
        "model",
        "adapter",
        "objective",
        "train",
        "optimizer",
        "loader",
        "parallel",
        "checkpoints",
        "validation",
        "report",
    )
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
        ({"flow_schedule_shift": 3, "flow_schedule_auto_shift": True}, {"objective.shift": 3.0}),
        ({"flow_schedule_shift": 0, "flow_schedule_auto_shift": True}, {"objective.shift": "auto"}),
        ({"flow_use_uniform_schedule": True}, {"objective.timesteps": "uniform"}),
        ({"flow_sigmoid_scale": 0.5}, {"objective.logit_std": 0.5}),
        ({"flux_guidance_value": "3.5"}, {"objective.guidance": 3.5}),
        ({"--flux_guidance_mode": "constant", "--flux_guidance_value": 2}, {"objective.guidance": 2.0}),
        ({"flux_guidance_mode": "random-range", "flux_guidance_value": 2, "flux_guidance_max": 4}, {}),
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
        ({"max_grad_norm": 0.1}, {"train.max_grad_value": 0.1}),
        ({"max_grad_norm": 0.1, "grad_clip_method": "norm"}, {"train.max_grad_norm": 0.1}),
        ({"grad_clip_method": "value"}, {"train.max_grad_value": 2.0}),
        ({"grad_clip_method": "norm", "max_grad_norm": 0}, {}),
        ({"use_ema": True, "ema_decay": 0.81, "ema_update_interval": 2}, {"train.ema_decay": 0.9}),
        (
            {"lr_scheduler": "polynomial", "learning_rate": 1e-4, "lr_warmup_steps": 5, "lr_end": 2e-5},
            {
                "optimizer.lr_scheduler": "polynomial",
                "optimizer.learning_rate": 1e-4,
                "optimizer.lr_warmup_steps": 5,
                "optimizer.lr_end_factor": 0.2,
                "optimizer.lr_power": 0.8,
            },
        ),
        (
            {
                "lr_scheduler": "cosine_with_restarts",
                "lr_warmup_steps": 25,
                "max_train_steps": 100,
                "learning_rate": 4e-4,
            },
            {
                "optimizer.lr_scheduler": "cosine_with_restarts",
                "optimizer.lr_cycles": 4,
                "optimizer.learning_rate": 4e-4,
                "optimizer.lr_end_factor": 0.001,
                "train.max_steps": 100,
            },
        ),
        ({"optimizer": "optimi-lion"}, {"optimizer.name": "lion"}),
        ({"optimizer": "bnb-lion8bit"}, {"optimizer.name": "lion"}),
        (
            {"optimizer_config": "weight_decay=0.5,eps=1e-6,beta1=0.8", "adam_weight_decay": 0.1},
            {"optimizer.weight_decay": 0.1, "optimizer.epsilon": 1e-6, "optimizer.beta1": 0.8},
        ),
        ({"peft_lora_target_modules": '["to_q", "to_k"]'}, {"adapter.targets": ("to_q", "to_k")}),
        ({"use_dora": True}, {"adapter.dora": True}),
        (
            {"model_family": "flux", "model_flavour": "dev", "flux_lora_target": "all+ffs"},
            {
                "model.family": "flux",
                "model.path": "black-forest-labs/FLUX.1-dev",
                "adapter.targets": "attention_mlp",
            },
        ),
        ({"flux_lora_target": "all+ffs"}, {}),
        ({"disable_bucket_pruning": True}, {"loader.drop_last": False}),
        (
            {"fsdp_enable": True, "fsdp_reshard_after_forward": False},
            {"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False},
        ),
    ],
)
def test_single_keys_of_simpletuner(load_text, tree, expected):
    assert settings(load_text(tree).config) == expected


@pytest.mark.parametrize(
    ("tree", "place", "says"),
    [
        (
            {"model_family": "flux"},
            "model_family",
            "no model is given; uses SimpleTuner's default, black-forest-labs/FLUX.1-Krea-dev",
        ),
        (
            {"flux_guidance_mode": "random-range"},
            "flux_guidance_mode",
            "objective.guidance is the same for all samples",
        ),
        ({"flux_guidance_min": 1}, "flux_guidance_min", "objective.guidance is the same for all samples"),
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


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (
            {"model_family": "sd1x"},
            'model_family: family "sd1x" of SimpleTuner is not available here yet; available: "flux"',
        ),
        (
            {"model_family": "sdxl", "model_flavour": "refiner-1.0"},
            'model_flavour: flavour "refiner-1.0" of SimpleTuner\'s family "sdxl" is not available here yet',
        ),
        (
            {"model_family": "wan", "model_flavour": "vace-14b-2.1"},
            'flavour "vace-14b-2.1" of SimpleTuner\'s family "wan"',
        ),
        ({"model_family": "qwen_image", "model_flavour": "edit-v3"}, 'flavour "edit-v3" of SimpleTuner'),
        ({"model_family": "flux", "model_flavour": "kontext"}, 'flavour "kontext" of SimpleTuner'),
        ({"model_family": "pixart_sigma", "pretrained_model_name_or_path": "owner/name"}, 'family "pixart_sigma" of'),
    ],
)
def test_a_model_of_simpletuner_that_is_not_here_is_refused_by_its_name(refuse, tree, says):
    (problem,) = refuse(tree)
    assert says in problem


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model_family": "fulx"}, 'model_family: "fulx" is not a family of SimpleTuner'),
        ({"model_family": "flux", "model_flavour": "devv"}, 'model_flavour: "devv" is not a known flavour'),
        (
            {"model_family": "flux", "pretrained_model_name_or_path": "flux.safetensors"},
            "pretrained_model_name_or_path: ",
        ),
        ({"pretrained_model_name_or_path": "a/b"}, "model.family: is missing"),
        ({"lora_type": "lycoris"}, 'lora_type: "lycoris" needs lycoris_config'),
        ({"lora_type": "lycoris", "lycoris_config": "no.json"}, 'lycoris_config: "no.json" does not exist'),
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
        ({"network": {"linear": 8}}, {"adapter.rank": 8, "adapter.alpha": 1.0}),
        ({"network": {"type": "lora", "lokr_factor": 8}}, {"adapter.type": "lora", "adapter.targets": "attention_mlp"}),
        (
            {"train": {"lr": 1e-4, "optimizer": "prodigyopt", "max_grad_norm": 1.0}},
            {"optimizer.learning_rate": 1.0, "optimizer.name": "prodigy", "train.max_grad_norm": 1.0},
        ),
        (
            {"train": {"lr": 1e-4, "lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": 1e-5}}},
            {"optimizer.learning_rate": 1e-4, "optimizer.lr_scheduler": "cosine", "optimizer.lr_end_factor": 0.1},
        ),
        (
            {"train": {"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 7}}},
            {"optimizer.lr_scheduler": "constant", "optimizer.lr_warmup_steps": 7},
        ),
        ({"train": {"lr_scheduler": "linear"}}, {"optimizer.lr_scheduler": "constant"}),
        (
            {"train": {"lr_scheduler": "linear", "lr_scheduler_params": {"start_factor": 1.0, "end_factor": 0.5}}},
            {"optimizer.lr_scheduler": "linear", "optimizer.lr_end_factor": 0.5},
        ),
        (
            {"train": {"optimizer_params": {"betas": [0.8, 0.95], "eps": 1e-6}}},
            {"optimizer.beta1": 0.8, "optimizer.beta2": 0.95, "optimizer.epsilon": 1e-6},
        ),
        ({"model": {"block_compile": True}}, {"model.compile": True}),
        (
            {"network": {"type": "dora"}},
            {"adapter.type": "lora", "adapter.targets": "attention_mlp", "adapter.dora": True},
        ),
        ({"train": {"cfg_scale": 3.5}}, {"objective.guidance": 3.5}),
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
        (
            {"model": {"arch": "wan23"}},
            'model.arch: "wan23" is not an architecture of ai-toolkit; available here: "wan22_14b"',
        ),
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
def test_a_model_of_ai_toolkit_that_is_not_here_is_refused_by_its_name(refuse, arch):
    (problem,) = refuse({"model": {"arch": arch, "name_or_path": "a/b"}})
    assert problem.startswith(f'model.arch: architecture "{arch}" of ai-toolkit is not available here yet; available: ')
