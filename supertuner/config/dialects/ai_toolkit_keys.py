"""The keys of a run in ai-toolkit (commit 27a03a91, August 2026) that act here, and their conversions."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects import model_conversions as model
from supertuner.config.dialects import optimizer_conversions as optim
from supertuner.config.dialects import train_conversions as train
from supertuner.config.dialects.conversions import map_value, positive_or_unset, rename_to, unless_null
from supertuner.config.dialects.dialect_keys import (
    AI_TOOLKIT,
    approximated_keys,
    converted_keys,
    sometimes_ignored_keys,
)
from supertuner.config.families import FAMILIES, expert_names

AI_TOOLKIT_CONVERTED_KEYS = (
    *converted_keys(
        AI_TOOLKIT,
        {
            "type": model.process_type,
            "name": to_ours.run_name,
            "training_folder": rename_to("run.output_dir"),
            "training_seed": unless_null("run.seed"),
            "device": rename_to("train.device"),
            "optimizer.name": optim.optimizer_name,
            "optimizer.lr": rename_to("optimizer.learning_rate"),
        },
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "steps": rename_to("train.max_steps"),
            "lr": train.ai_toolkit_learning_rate,
            "optimizer": optim.optimizer_name,
            "dtype": map_value("train.mixed_precision", to_ours.PRECISIONS),
            "mixed_precision": map_value("train.mixed_precision", to_ours.PRECISIONS),
            "gradient_accumulation": rename_to("train.gradient_accumulation_steps"),
            "lr_scheduler": optim.ai_toolkit_schedule,
            "lr_scheduler_params": optim.ai_toolkit_schedule_parameters,
            "attention_backend": unless_null("model.attention"),
            "cache_text_embeddings": to_ours.cache_location("text", "unified_memory"),
            "timestep_type": model.timestep_type,
            "cfg_scale": unless_null("objective.guidance"),  # ai-toolkit's name of the guidance input of Flux
            "min_snr_gamma": train.min_snr_gamma,
            "loss_type": train.ai_toolkit_loss,
            "ema_config": train.disabled_ema,
            "ema_config.use_ema": train.use_ema(0.999),
            "ema_config.ema_decay": train.ema_decay(enabled_by_default=True),
            "skip_first_sample": train.validate_at_start(inverted=True),
            "force_first_sample": train.validate_at_start(inverted=False, is_implied=True),
            "disable_sampling": train.disable_validation,
            "train_unet": train.train_denoiser,
        },
        "train",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "weight_decay": rename_to("optimizer.weight_decay"),
            "betas": optim.betas,
            "eps": rename_to("optimizer.epsilon"),
            **{
                f"{stage}{name}": rename_to(f"optimizer.{stage}{name}")
                for stage in ("", *(f"{expert}_" for expert in expert_names()))
                for name in ("lr_bump", "min_lr", "max_lr")
            },
        },
        "train.optimizer_params",
    ),
    *approximated_keys(
        AI_TOOLKIT,
        "counts optimizer steps; ai-toolkit counts micro-batches, so that one step can mix experts",
        {"switch_boundary_every": rename_to("model.switch_boundary_every")},
        "train",
    ),
    *approximated_keys(
        AI_TOOLKIT,
        "noise levels are uniform; ai-toolkit also weights them by a bell curve",
        {"linear_timesteps": train.linear_timesteps, "linear_timesteps2": train.linear_timesteps},
        "train",
    ),
    *approximated_keys(
        AI_TOOLKIT,
        f"is read as min_snr_gamma; {train.UNCAPPED_WEIGHT_NOTE}",
        {"snr_gamma": train.min_snr_gamma},
        "train",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "name_or_path": model.name_or_path,
            "arch": model.architecture,
            **{
                record.ai_toolkit_switch: model.is_architecture(name)
                for name, record in FAMILIES.items()
                if record.ai_toolkit_switch is not None
            },
            "quantize": model.quantize,
            "qtype": to_ours.used_by_key("quantize", is_switch=False),
            "block_compile": to_ours.set_if_true("model.compile", True),
            **{
                f"model_kwargs.train_{expert}": model.trained_experts(tuple(record.experts))
                for record in FAMILIES.values()
                if record.has_several_experts
                for expert in record.experts
            },
        },
        "model",
    ),
    *sometimes_ignored_keys(
        AI_TOOLKIT,
        "these families are not available here yet",
        {name: model.is_architecture("", name.removeprefix("is_")) for name in model.OTHER_SWITCHES},
        "model",
    ),
    *approximated_keys(
        AI_TOOLKIT,
        "stays a frozen adapter below the trained one; ai-toolkit adds it to the weights of the model",
        {"lora_path": unless_null("adapter.frozen")},
        "model",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "type": model.network_type,
            "linear": model.network_rank,
            "rank": model.network_rank,
            "linear_alpha": unless_null("adapter.alpha"),
            "alpha": model.network_alpha,
            "dropout": unless_null("adapter.dropout"),
            "lokr_factor": model.lokr_only("adapter.lokr_factor"),
            "lokr_full_rank": model.lokr_only("adapter.lokr_full_matrix"),
            "pretrained_lora_path": unless_null("adapter.start_from"),
        },
        "network",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "save_every": positive_or_unset("checkpoints.every_steps"),
            "max_step_saves_to_keep": train.saves_to_keep,
            "push_to_hub": train.push_to_hub("hf_repo_id"),
            "hf_repo_id": to_ours.used_by_key("push_to_hub", is_switch=False),
            "hf_private": unless_null("exports.hub_private"),
        },
        "save",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "sample_every": train.sample_interval,
            "width": rename_to("validation.width"),
            "height": rename_to("validation.height"),
            "num_frames": rename_to("validation.frames"),
            "fps": rename_to("validation.fps"),
            "prompts": train.sample_prompts,
            "neg": train.negative_prompt,
            "seed": train.sample_seed,
            "guidance_scale": rename_to("validation.guidance_scale"),
            "sample_steps": rename_to("validation.inference_steps"),
        },
        "sample",
    ),
    *approximated_keys(
        AI_TOOLKIT,
        "all prompts share one size, seed, guidance scale and number of steps: those of the sample block",
        {"samples": train.sample_entries},
        "sample",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "use_wandb": train.use_wandb,
            "project_name": to_ours.used_by_key("use_wandb", is_switch=False),
            "log_every": positive_or_unset("report.every_steps"),
        },
        "logging",
    ),
)
