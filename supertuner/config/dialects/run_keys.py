"""The keys of a run (outside datasets) in SimpleTuner and ai-toolkit, and their conversions."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects import model_conversions as model
from supertuner.config.dialects import train_conversions as train
from supertuner.config.dialects.conversions import map_value, positive_or_unset, rename_to, unless_null
from supertuner.config.dialects.dataset_keys import NO_SIZES, NOT_NEEDED
from supertuner.config.dialects.dialect_keys import AI_TOOLKIT, SIMPLETUNER, DialectKey, converted_keys, ignored_keys
from supertuner.config.families import FAMILIES, expert_names

ONE_PIPELINE = "has no effect: all components come from the pipeline of model.path"
NO_ASSISTANT = "has no effect: assistant adapters are not supported; adapter.frozen trains on top of a frozen adapter"
NO_TEXT_TRAINING = "has no effect: text encoders are not trained"
NO_OFFLOAD = (
    "has no effect: the plan moves weights, activations and optimizer state to host memory if the run does not fit "
    'into GPU memory; plan.weights: "streamed" always keeps block weights in host memory'
)
CHOSEN_BY_TRAINER = "has no effect: the trainer chooses this automatically"
CHOSEN_BY_FAMILY = "has no effect: the model family determines its objective and sampler"
NO_LOSS = "has no effect: use objective.loss and objective.weighting"
NO_SUCH_SCHEDULE = "has no effect: it belongs to a schedule that is not available"
NO_OPTIMIZER_OPTIONS = "has no effect: further options of optimizers are not available"
NOT_UPLOADED = "has no effect: nothing is uploaded, and no other service is notified"
ALWAYS_ON_REQUEST = "has no effect: `supertuner validate` and SIGUSR1 request a validation from any running job"
NO_PROMPT_LIBRARY = "has no effect: write the prompts into validation.prompts"
ONE_EXPORT = "has no effect: exports have the format that diffusers loads; `supertuner adapter convert` writes others"

SIMPLETUNER_RUN_KEYS = (
    *converted_keys(
        SIMPLETUNER,
        {
            "train_batch_size": rename_to("train.batch_size"),
            "gradient_accumulation_steps": rename_to("train.gradient_accumulation_steps"),
            "max_train_steps": positive_or_unset("train.max_steps"),
            "num_train_epochs": positive_or_unset("train.num_epochs"),
            "mixed_precision": map_value("train.mixed_precision", to_ours.PRECISIONS),
            "gradient_checkpointing": rename_to("train.gradient_checkpointing"),
            "max_grad_norm": positive_or_unset("train.max_grad_norm"),
            "learning_rate": rename_to("optimizer.learning_rate"),
            "optimizer": map_value("optimizer.name", to_ours.OPTIMIZERS),
            "lr_scheduler": map_value("optimizer.lr_scheduler", to_ours.SCHEDULERS),
            "lr_warmup_steps": rename_to("optimizer.lr_warmup_steps"),
            "adam_weight_decay": rename_to("optimizer.weight_decay"),
            "use_ema": train.use_ema(0.995),
            "ema_decay": train.ema_decay(enabled_by_default=False),
            "seed": unless_null("run.seed"),
            "output_dir": rename_to("run.output_dir"),
            "tracker_run_name": to_ours.run_name,
            "max_workers": rename_to("loader.num_workers"),
            "dataloader_prefetch_qlen": rename_to("loader.prefetch_batches"),
            "initial_effective_batch_size": to_ours.ramp_setting("initial_effective_batch_size"),
            "target_effective_batch_size": to_ours.ramp_setting("target_effective_batch_size"),
            "batch_rampup_steps": to_ours.ramp_setting("batch_rampup_steps"),
            "use_gh200_trainer": to_ours.use_gh200_trainer,
            "cache_dir": to_ours.cache_dir,
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
            "lora_rank": rename_to("adapter.rank"),
            "lora_alpha": unless_null("adapter.alpha"),
            "lora_dropout": unless_null("adapter.dropout"),
            "flow_schedule_shift": model.flow_shift,
            "flow_schedule_auto_shift": model.set_if_true("objective.shift", "auto"),
            "flow_use_uniform_schedule": model.set_if_true("objective.timesteps", "uniform"),
            "flow_sigmoid_scale": rename_to("objective.logit_std"),
            "snr_gamma": train.min_snr_gamma,
            "loss_type": train.simpletuner_loss,
            "huber_c": train.huber_delta,
            "huber_schedule": train.huber_schedule,
        },
    ),
    *converted_keys(
        SIMPLETUNER,
        {
            "checkpoint_step_interval": positive_or_unset("checkpoints.every_steps"),
            "checkpointing_steps": positive_or_unset("checkpoints.every_steps"),
            "checkpoints_total_limit": positive_or_unset("checkpoints.keep"),
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
        },
    ),
    *ignored_keys(
        SIMPLETUNER,
        ONE_PIPELINE,
        "pretrained_transformer_model_name_or_path pretrained_vae_model_name_or_path pretrained_t5_model_name_or_path",
    ),
    *ignored_keys(SIMPLETUNER, ONE_EXPORT, "lora_format"),
    *ignored_keys(SIMPLETUNER, CHOSEN_BY_FAMILY, "refiner_training fuse_qkv_projections noise_offset"),
    *ignored_keys(SIMPLETUNER, NO_TEXT_TRAINING, "train_text_encoder"),
    *ignored_keys(SIMPLETUNER, NO_SUCH_SCHEDULE, "lr_end lr_num_cycles lr_power"),
    *ignored_keys(SIMPLETUNER, NO_OPTIMIZER_OPTIONS, "optimizer_config"),
    *ignored_keys(
        SIMPLETUNER,
        CHOSEN_BY_TRAINER,
        "quantize_via vae_batch_size write_batch_size dataloader_prefetch gradient_checkpointing_interval "
        "gradient_precision allow_tf32 dynamo_mode vae_dtype vae_enable_tiling vae_enable_slicing keep_vae_loaded "
        "checkpointing_epochs validation_torch_compile",
    ),
    *ignored_keys(
        SIMPLETUNER,
        NO_OFFLOAD,
        "offload_during_startup enable_group_offload group_offload_type group_offload_use_stream ramtorch",
    ),
    *ignored_keys(SIMPLETUNER, "has no effect: logs are in the run folder", "logging_dir"),
    *ignored_keys(SIMPLETUNER, CHOSEN_BY_FAMILY, "validation_guidance_rescale validation_guidance_real"),
    *ignored_keys(SIMPLETUNER, ALWAYS_ON_REQUEST, "enable_manual_validation"),
    *ignored_keys(SIMPLETUNER, NO_PROMPT_LIBRARY, "validation_prompt_library user_prompt_library"),
    *ignored_keys(
        SIMPLETUNER,
        NOT_UPLOADED,
        "push_to_hub push_checkpoints_to_hub push_to_hub_background hub_model_id publishing_config webhook_config",
    ),
    *ignored_keys(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *ignored_keys(
        SIMPLETUNER,
        NOT_NEEDED,
        "aspect_bucket_rounding compress_disk_cache preserve_data_backend_cache skip_file_discovery "
        "metadata_update_interval",
    ),
)

AI_TOOLKIT_RUN_KEYS = (
    *converted_keys(
        AI_TOOLKIT,
        {
            "name": to_ours.run_name,
            "training_folder": rename_to("run.output_dir"),
            "device": rename_to("train.device"),
            "train.steps": rename_to("train.max_steps"),
            "train.lr": rename_to("optimizer.learning_rate"),
            "train.optimizer": map_value("optimizer.name", to_ours.OPTIMIZERS),
            "train.dtype": map_value("train.mixed_precision", to_ours.PRECISIONS),
            "train.mixed_precision": map_value("train.mixed_precision", to_ours.PRECISIONS),
            "train.gradient_accumulation": rename_to("train.gradient_accumulation_steps"),
            "train.lr_scheduler": map_value("optimizer.lr_scheduler", to_ours.SCHEDULERS),
            "train.cache_text_embeddings": to_ours.cache_location("text", "unified_memory"),
            "train.switch_boundary_every": rename_to("model.switch_boundary_every"),
            "train.timestep_type": model.timestep_type,
            "train.snr_gamma": train.ai_toolkit_snr_gamma,
            "train.min_snr_gamma": train.min_snr_gamma,
            "train.loss_type": train.ai_toolkit_loss,
            "train.ema_config": train.disabled_ema,
            "train.ema_config.use_ema": train.use_ema(0.999),
            "train.ema_config.ema_decay": train.ema_decay(enabled_by_default=True),
            "train.skip_first_sample": train.validate_at_start(inverted=True),
            "train.force_first_sample": train.validate_at_start(inverted=False, is_implied=True),
            "train.disable_sampling": train.disable_validation,
            "optimizer.name": map_value("optimizer.name", to_ours.OPTIMIZERS),
            "optimizer.lr": rename_to("optimizer.learning_rate"),
        },
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            f"{stage}{name}": rename_to(f"optimizer.{stage}{name}")
            for stage in ("", *(f"{expert}_" for expert in expert_names()))
            for name in ("lr_bump", "min_lr", "max_lr")
        },
        "train.optimizer_params",
    ),
    DialectKey(AI_TOOLKIT, "train.optimizer_params.weight_decay", rename_to("optimizer.weight_decay")),
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
            "is_v2": model.is_architecture(""),
            "quantize": model.quantize,
            "qtype": to_ours.used_by_key("quantize", is_switch=False),
            **{
                f"model_kwargs.train_{expert}": model.trained_experts(tuple(record.experts))
                for record in FAMILIES.values()
                if record.has_several_experts
                for expert in record.experts
            },
        },
        "model",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "type": model.network_type,
            "linear": rename_to("adapter.rank"),
            "rank": rename_to("adapter.rank"),
            "linear_alpha": unless_null("adapter.alpha"),
            "alpha": unless_null("adapter.alpha"),
            "dropout": unless_null("adapter.dropout"),
            "lokr_factor": unless_null("adapter.lokr_factor"),
            "lokr_full_rank": unless_null("adapter.lokr_full_matrix"),
        },
        "network",
    ),
    *converted_keys(
        AI_TOOLKIT,
        {
            "save_every": positive_or_unset("checkpoints.every_steps"),
            "max_step_saves_to_keep": positive_or_unset("checkpoints.keep"),
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
            "samples": train.sample_entries,
            "neg": unless_null("validation.negative_prompt"),
            "seed": train.sample_seed,
            "guidance_scale": rename_to("validation.guidance_scale"),
            "sample_steps": rename_to("validation.inference_steps"),
        },
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
    *ignored_keys(
        AI_TOOLKIT,
        CHOSEN_BY_FAMILY,
        "noise_scheduler content_or_style min_denoising_steps max_denoising_steps noise_offset linear_timesteps "
        "bypass_guidance_embedding noise_multiplier weight_jitter",
        "train",
    ),
    *ignored_keys(AI_TOOLKIT, NO_LOSS, "loss_target diff_output_preservation", "train"),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: the adapter block determines what is trained; text encoders are not trained",
        "train_unet train_text_encoder unet_lr text_encoder_lr",
        "train",
    ),
    *ignored_keys(AI_TOOLKIT, NO_SUCH_SCHEDULE, "lr_scheduler_params", "train"),
    *ignored_keys(
        AI_TOOLKIT, "has no effect: the prediction type is read from the model's scheduler", "is_v_pred", "model"
    ),
    *ignored_keys(
        AI_TOOLKIT,
        CHOSEN_BY_TRAINER,
        "unload_text_encoder xformers sdp merge_network_on_save start_step single_item_batching",
        "train",
    ),
    *ignored_keys(AI_TOOLKIT, ONE_PIPELINE, "vae_path", "model"),
    *ignored_keys(AI_TOOLKIT, CHOSEN_BY_TRAINER, "dtype quantize_te qtype_te", "model"),
    *ignored_keys(AI_TOOLKIT, NO_OFFLOAD, "low_vram", "model"),
    *ignored_keys(AI_TOOLKIT, NO_ASSISTANT, "assistant_lora_path", "model"),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: use adapter.targets",
        "conv conv_alpha network_kwargs",
        "network",
    ),
    *ignored_keys(AI_TOOLKIT, ONE_EXPORT, "dtype save_format", "save"),
    *ignored_keys(AI_TOOLKIT, NOT_UPLOADED, "push_to_hub hf_repo_id hf_private", "save"),
    *ignored_keys(
        AI_TOOLKIT, "has no effect: every prompt is sampled with every seed of validation.seeds", "walk_seed", "sample"
    ),
    *ignored_keys(AI_TOOLKIT, CHOSEN_BY_FAMILY, "sampler guidance_rescale network_multiplier", "sample"),
    *ignored_keys(AI_TOOLKIT, "has no effect: samples are PNG files, and MP4 for videos", "format", "sample"),
    *ignored_keys(AI_TOOLKIT, "has no effect: a run has one name, run.name", "run_name", "logging"),
    *ignored_keys(AI_TOOLKIT, "has no effect: losses.jsonl has every step", "verbose", "logging"),
    *ignored_keys(AI_TOOLKIT, "has no effect: losses.jsonl has every step", "performance_log_every"),
    *ignored_keys(AI_TOOLKIT, "has no effect: there is only one kind of job", "type job meta"),
)

RUN_KEYS = SIMPLETUNER_RUN_KEYS + AI_TOOLKIT_RUN_KEYS
