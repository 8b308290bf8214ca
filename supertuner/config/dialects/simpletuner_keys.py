"""The keys of a run in SimpleTuner (field registry and command line of v4.8.0) that act here, and their conversions."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects import model_conversions as model
from supertuner.config.dialects import optimizer_conversions as optim
from supertuner.config.dialects import train_conversions as train
from supertuner.config.dialects.conversions import map_value, positive_or_unset, rename_to, unless_null
from supertuner.config.dialects.dialect_keys import SIMPLETUNER, approximated_keys, converted_keys
from supertuner.config.families import FAMILIES

SIMPLETUNER_CONVERTED_KEYS = (
    *converted_keys(
        SIMPLETUNER,
        {
            "train_batch_size": rename_to("train.batch_size"),
            "gradient_accumulation_steps": rename_to("train.gradient_accumulation_steps"),
            "max_train_steps": positive_or_unset("train.max_steps"),
            "num_train_epochs": positive_or_unset("train.num_epochs"),
            "mixed_precision": map_value("train.mixed_precision", to_ours.PRECISIONS),
            "gradient_checkpointing": rename_to("train.gradient_checkpointing"),
            "max_grad_norm": optim.simpletuner_clipping,
            "grad_clip_method": optim.clipping_method,
            "learning_rate": rename_to("optimizer.learning_rate"),
            "optimizer": optim.optimizer_name,
            "optimizer_config": optim.simpletuner_optimizer_config,
            "lr_scheduler": optim.simpletuner_schedule,
            "lr_warmup_steps": optim.simpletuner_warmup,
            "lr_end": optim.simpletuner_lr_end,
            "lr_power": optim.simpletuner_lr_power,
            "adam_weight_decay": rename_to("optimizer.weight_decay"),
            "adam_beta1": rename_to("optimizer.beta1"),
            "adam_beta2": rename_to("optimizer.beta2"),
            "adam_epsilon": rename_to("optimizer.epsilon"),
            "optimizer_beta1": unless_null("optimizer.beta1"),
            "optimizer_beta2": unless_null("optimizer.beta2"),
            "use_ema": train.use_ema(0.995),
            "ema_decay": train.ema_decay(enabled_by_default=False),
            "seed": train.simpletuner_seed,
            "output_dir": rename_to("run.output_dir"),
            "tracker_run_name": to_ours.run_name,
            "max_workers": rename_to("loader.num_workers"),
            "dataloader_prefetch_qlen": rename_to("loader.prefetch_batches"),
            "disable_bucket_pruning": to_ours.set_if_true("loader.drop_last", False),
            "initial_effective_batch_size": to_ours.ramp_setting("initial_effective_batch_size"),
            "target_effective_batch_size": to_ours.ramp_setting("target_effective_batch_size"),
            "batch_rampup_steps": to_ours.ramp_setting("batch_rampup_steps"),
            "use_gh200_trainer": to_ours.use_gh200_trainer,
            "fsdp_enable": to_ours.set_if_true("parallel.strategy", "fsdp"),
            "fsdp_reshard_after_forward": rename_to("parallel.reshard_after_forward"),
            "fsdp_cpu_offload": to_ours.set_if_true("parallel.cpu_offload", True),
        },
    ),
    *converted_keys(
        SIMPLETUNER,
        {
            "model_family": model.model_family,
            "model_flavour": model.model_flavour,
            "pretrained_model_name_or_path": model.model_path,
            "revision": unless_null("model.revision"),
            "variant": unless_null("model.variant"),
            "base_model_precision": model.base_precision,
            "attention_mechanism": model.attention,
            "dynamo_backend": model.dynamo_backend,
            "model_type": model.model_type,
            "lora_type": model.lora_type,
            "lycoris_config": model.lycoris_file,
            "init_lora": unless_null("adapter.start_from"),
            "lora_rank": model.lora_size("adapter.rank"),
            "lora_alpha": model.lora_size("adapter.alpha"),
            "lora_dropout": model.lora_size("adapter.dropout"),
            "use_dora": to_ours.set_if_true("adapter.dora", True),
            "peft_lora_target_modules": model.peft_targets,
            "flow_schedule_shift": model.flow_shift,
            "flow_schedule_auto_shift": model.auto_shift,
            "flow_use_uniform_schedule": to_ours.set_if_true("objective.timesteps", "uniform"),
            "flow_sigmoid_scale": rename_to("objective.logit_std"),
            "flux_guidance_mode": model.guidance_mode,
            "flux_guidance_value": model.guidance_value,
            "snr_gamma": train.min_snr_gamma,
            "loss_type": train.simpletuner_loss,
            "huber_c": train.huber_delta,
        },
    ),
    *converted_keys(
        SIMPLETUNER,
        {
            "checkpoint_step_interval": positive_or_unset("checkpoints.every_steps"),
            "checkpointing_steps": positive_or_unset("checkpoints.every_steps"),
            "checkpoints_total_limit": train.saves_to_keep,
            "save_total_limit": train.saves_to_keep,
            "lora_format": train.export_format,
            "push_to_hub": train.push_to_hub("hub_model_id"),
            "hub_model_id": to_ours.used_by_key("push_to_hub", is_switch=False),
            "model_card_private": unless_null("exports.hub_private"),
            "resume_from_checkpoint": train.resume,
            "validation_prompt": train.validation_prompt,
            "validation_negative_prompt": unless_null("validation.negative_prompt"),
            "validation_seed": train.validation_seeds,
            "num_validation_images": train.validation_seeds,
            "validation_step_interval": train.validation_interval,
            "validation_steps": train.validation_interval,
            "validation_resolution": train.validation_resolution,
            "validation_guidance": rename_to("validation.guidance_scale"),
            "validation_num_inference_steps": rename_to("validation.inference_steps"),
            "validation_num_video_frames": unless_null("validation.frames"),
            "framerate": unless_null("validation.fps"),
            "validation_disable": train.disable_validation,
            "validation_on_startup": train.validate_at_start(inverted=False),
            "disable_benchmark": train.validate_at_start(inverted=True, is_implied=True),
            "report_to": train.report_to,
            "tracker_project_name": train.tracker_project_name,
            "vae_cache_disable": to_ours.set_if_true("cache_config.vae_cache_type", "none"),
            "text_cache_disable": to_ours.set_if_true("cache_config.text_cache_type", "none"),
        },
    ),
    *approximated_keys(
        SIMPLETUNER,
        "one folder holds all caches of a run: cache_config.cache_dir, with persistent_cache",
        {"cache_dir": to_ours.cache_dir, "cache_dir_vae": to_ours.cache_dir, "cache_dir_text": to_ours.cache_dir},
    ),
    *approximated_keys(
        SIMPLETUNER,
        "the average is updated after every step, and its decay adapted to that",
        {
            "ema_update_interval": train.ema_interval,
        },
    ),
    *approximated_keys(
        SIMPLETUNER,
        "the preset of adapter.targets that is closest to it",
        {
            f"{record.simpletuner.family}_lora_target": model.lora_targets(record.simpletuner)
            for record in FAMILIES.values()
            if record.simpletuner.lora_targets
        },
    ),
    *approximated_keys(
        SIMPLETUNER,
        "objective.huber_delta is the same at every noise level",
        {"huber_schedule": train.huber_schedule},
    ),
    *approximated_keys(
        SIMPLETUNER,
        "the held-out loss is measured at every validation, on datasets with held_out: true",
        {"eval_steps_interval": train.eval_interval},
    ),
)
