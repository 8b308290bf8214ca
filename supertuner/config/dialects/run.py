"""Foreign keys of a run: what SimpleTuner and ai-toolkit call a setting, and what becomes of it here."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects import loss_conversions as loss
from supertuner.config.dialects import model_conversions as model
from supertuner.config.dialects import train_conversions as train
from supertuner.config.dialects.conversions import by_table, positive_or_unset, to, unless_null
from supertuner.config.dialects.dataset import NO_SIZES, NOT_NEEDED
from supertuner.config.dialects.rows import AI_TOOLKIT, SIMPLETUNER, Row, rows, without_effect

ONE_PIPELINE = "has no effect: all parts come from the pipeline of model.path"
NO_ASSISTANT = "has no effect: no adapter is taken away again after training; adapter.frozen trains on top of one"
NO_TEXT_TRAINING = "has no effect: text encoders are not trained"
NO_OFFLOAD = "has no effect yet: weights are not sent to host memory by plan; memory.overflow lets them spill there"
BY_ITSELF = "has no effect: the trainer chooses this by itself"
BY_FAMILY = "has no effect: the family's own objective and sampler are used"
NO_LOSS = "has no effect: the loss is objective.loss of the model's target, weighted by objective.weighting"
NO_CURVE = "has no effect: it belongs to a schedule that is not available"
NO_OPTIONS = "has no effect: an optimizer's further options are not settings here"
NOT_UPLOADED = "has no effect: nothing is uploaded, and no other service is told"
ALWAYS_ASKABLE = "has no effect: a running job can always be asked, by `supertuner validate` or SIGUSR1"
NO_LIBRARY = "has no effect: write the prompts into validation.prompts"
ONE_EXPORT = "has no effect: what was trained is exported in the layout that diffusers loads"

SIMPLETUNER_ROWS = (
    *rows(
        SIMPLETUNER,
        {
            "train_batch_size": to("train.batch_size"),
            "gradient_accumulation_steps": to("train.gradient_accumulation_steps"),
            "max_train_steps": positive_or_unset("train.max_steps"),
            "num_train_epochs": positive_or_unset("train.num_epochs"),
            "mixed_precision": by_table("train.mixed_precision", to_ours.PRECISIONS),
            "gradient_checkpointing": to("train.gradient_checkpointing"),
            "max_grad_norm": positive_or_unset("train.max_grad_norm"),
            "learning_rate": to("optimizer.learning_rate"),
            "optimizer": by_table("optimizer.name", to_ours.OPTIMIZERS),
            "lr_scheduler": by_table("optimizer.lr_scheduler", to_ours.SCHEDULERS),
            "lr_warmup_steps": to("optimizer.lr_warmup_steps"),
            "adam_weight_decay": to("optimizer.weight_decay"),
            "use_ema": train.use_ema(0.995),
            "ema_decay": train.ema_decay(on_unless_said=False),
            "seed": unless_null("run.seed"),
            "output_dir": to("run.output_dir"),
            "tracker_run_name": to_ours.run_name,
            "max_workers": to("loader.num_workers"),
            "dataloader_prefetch_qlen": to("loader.prefetch_batches"),
            "initial_effective_batch_size": to_ours.ramp("initial_effective_batch_size"),
            "target_effective_batch_size": to_ours.ramp("target_effective_batch_size"),
            "batch_rampup_steps": to_ours.ramp("batch_rampup_steps"),
            "use_gh200_trainer": to_ours.use_gh200_trainer,
            "cache_dir": to_ours.cache_dir,
        },
    ),
    *rows(
        SIMPLETUNER,
        {
            "model_family": model.family,
            "model_flavour": model.flavour,
            "pretrained_model_name_or_path": model.path,
            "revision": unless_null("model.revision"),
            "variant": unless_null("model.variant"),
            "base_model_precision": model.base_precision,
            "attention_mechanism": model.attention,
            "dynamo_backend": model.compiler,
            "model_type": model.model_type,
            "lora_type": model.adapter_kind,
            "lycoris_config": model.lycoris_file,
            "init_lora": unless_null("adapter.start_from"),
            "lora_rank": to("adapter.rank"),
            "lora_alpha": unless_null("adapter.alpha"),
            "lora_dropout": unless_null("adapter.dropout"),
            "flow_schedule_shift": model.shift,
            "flow_schedule_auto_shift": model.if_true("objective.shift", "auto"),
            "flow_use_uniform_schedule": model.if_true("objective.timesteps", "uniform"),
            "flow_sigmoid_scale": to("objective.logit_std"),
            "snr_gamma": loss.min_snr,
            "loss_type": loss.simpletuner_loss,
            "huber_c": loss.huber_delta,
            "huber_schedule": loss.huber_schedule,
        },
    ),
    *rows(
        SIMPLETUNER,
        {
            "checkpoint_step_interval": positive_or_unset("checkpoints.every_steps"),
            "checkpointing_steps": positive_or_unset("checkpoints.every_steps"),
            "checkpoints_total_limit": positive_or_unset("checkpoints.keep"),
            "resume_from_checkpoint": train.resume,
            "validation_prompt": train.prompt,
            "validation_negative_prompt": unless_null("validation.negative_prompt"),
            "validation_seed": train.seeds,
            "num_validation_images": train.seeds,
            "validation_step_interval": train.validation_interval,
            "validation_steps": train.validation_interval,
            "validation_resolution": train.size,
            "validation_guidance": to("validation.guidance_scale"),
            "validation_num_inference_steps": to("validation.inference_steps"),
            "validation_num_video_frames": unless_null("validation.frames"),
            "framerate": unless_null("validation.fps"),
            "validation_disable": train.no_validation,
            "validation_on_startup": train.at_start(unless=False),
            "disable_benchmark": train.at_start(unless=True, weak=True),
            "report_to": train.report_to,
            "tracker_project_name": train.project,
        },
    ),
    *without_effect(
        SIMPLETUNER,
        ONE_PIPELINE,
        "pretrained_transformer_model_name_or_path pretrained_vae_model_name_or_path pretrained_t5_model_name_or_path",
    ),
    *without_effect(SIMPLETUNER, ONE_EXPORT, "lora_format"),
    *without_effect(SIMPLETUNER, BY_FAMILY, "refiner_training fuse_qkv_projections noise_offset"),
    *without_effect(SIMPLETUNER, NO_TEXT_TRAINING, "train_text_encoder"),
    *without_effect(SIMPLETUNER, NO_CURVE, "lr_end lr_num_cycles lr_power"),
    *without_effect(SIMPLETUNER, NO_OPTIONS, "optimizer_config"),
    *without_effect(
        SIMPLETUNER,
        BY_ITSELF,
        "quantize_via vae_batch_size write_batch_size dataloader_prefetch gradient_checkpointing_interval "
        "gradient_precision allow_tf32 dynamo_mode vae_dtype vae_enable_tiling vae_enable_slicing keep_vae_loaded "
        "checkpointing_epochs validation_torch_compile",
    ),
    *without_effect(
        SIMPLETUNER,
        NO_OFFLOAD,
        "offload_during_startup enable_group_offload group_offload_type group_offload_use_stream ramtorch",
    ),
    *without_effect(SIMPLETUNER, "has no effect: everything of a run is in its folder", "logging_dir"),
    *without_effect(SIMPLETUNER, BY_FAMILY, "validation_guidance_rescale validation_guidance_real"),
    *without_effect(SIMPLETUNER, ALWAYS_ASKABLE, "enable_manual_validation"),
    *without_effect(SIMPLETUNER, NO_LIBRARY, "validation_prompt_library user_prompt_library"),
    *without_effect(
        SIMPLETUNER,
        NOT_UPLOADED,
        "push_to_hub push_checkpoints_to_hub push_to_hub_background hub_model_id publishing_config webhook_config",
    ),
    *without_effect(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "aspect_bucket_rounding compress_disk_cache preserve_data_backend_cache skip_file_discovery "
        "metadata_update_interval",
    ),
)

AI_TOOLKIT_ROWS = (
    *rows(
        AI_TOOLKIT,
        {
            "name": to_ours.run_name,
            "training_folder": to("run.output_dir"),
            "device": to("train.device"),
            "train.steps": to("train.max_steps"),
            "train.lr": to("optimizer.learning_rate"),
            "train.optimizer": by_table("optimizer.name", to_ours.OPTIMIZERS),
            "train.dtype": by_table("train.mixed_precision", to_ours.PRECISIONS),
            "train.mixed_precision": by_table("train.mixed_precision", to_ours.PRECISIONS),
            "train.gradient_accumulation": to("train.gradient_accumulation_steps"),
            "train.lr_scheduler": by_table("optimizer.lr_scheduler", to_ours.SCHEDULERS),
            "train.cache_text_embeddings": to_ours.cache_to("text", "unified_memory"),
            "train.switch_boundary_every": to("model.switch_boundary_every"),
            "train.timestep_type": model.timestep_type,
            "train.snr_gamma": loss.fixed_snr,
            "train.min_snr_gamma": loss.min_snr,
            "train.loss_type": loss.ai_toolkit_loss,
            "train.ema_config": train.no_ema_block,
            "train.ema_config.use_ema": train.use_ema(0.999),
            "train.ema_config.ema_decay": train.ema_decay(on_unless_said=True),
            "train.skip_first_sample": train.at_start(unless=True),
            "train.force_first_sample": train.at_start(unless=False, weak=True),
            "train.disable_sampling": train.no_validation,
            "optimizer.name": by_table("optimizer.name", to_ours.OPTIMIZERS),
            "optimizer.lr": to("optimizer.learning_rate"),
        },
    ),
    *rows(
        AI_TOOLKIT,
        {
            f"{stage}{name}": to(f"optimizer.{stage}{name}")
            for stage in ("", "high_noise_", "low_noise_")
            for name in ("lr_bump", "min_lr", "max_lr")
        },
        "train.optimizer_params",
    ),
    Row(AI_TOOLKIT, "train.optimizer_params.weight_decay", to("optimizer.weight_decay")),
    *rows(
        AI_TOOLKIT,
        {
            "name_or_path": model.name_or_path,
            "arch": model.architecture,
            "is_flux": model.is_architecture("flux"),
            "is_xl": model.is_architecture("sdxl"),
            "is_v3": model.is_architecture("sd3.5"),
            "is_v2": model.is_architecture(""),
            "quantize": model.quantize,
            "qtype": to_ours.read_by("quantize", switch=False),
            "model_kwargs.train_high_noise": model.experts,
            "model_kwargs.train_low_noise": model.experts,
        },
        "model",
    ),
    *rows(
        AI_TOOLKIT,
        {
            "type": model.network_type,
            "linear": to("adapter.rank"),
            "rank": to("adapter.rank"),
            "linear_alpha": unless_null("adapter.alpha"),
            "alpha": unless_null("adapter.alpha"),
            "dropout": unless_null("adapter.dropout"),
            "lokr_factor": unless_null("adapter.lokr_factor"),
            "lokr_full_rank": unless_null("adapter.lokr_full_matrix"),
        },
        "network",
    ),
    *rows(
        AI_TOOLKIT,
        {
            "save_every": positive_or_unset("checkpoints.every_steps"),
            "max_step_saves_to_keep": positive_or_unset("checkpoints.keep"),
        },
        "save",
    ),
    *rows(
        AI_TOOLKIT,
        {
            "sample_every": train.sample_interval,
            "width": to("validation.width"),
            "height": to("validation.height"),
            "num_frames": to("validation.frames"),
            "fps": to("validation.fps"),
            "prompts": train.prompts,
            "samples": train.samples,
            "neg": unless_null("validation.negative_prompt"),
            "seed": train.seed,
            "guidance_scale": to("validation.guidance_scale"),
            "sample_steps": to("validation.inference_steps"),
        },
        "sample",
    ),
    *rows(
        AI_TOOLKIT,
        {
            "use_wandb": train.use_wandb,
            "project_name": to_ours.read_by("use_wandb", switch=False),
            "log_every": positive_or_unset("report.every_steps"),
        },
        "logging",
    ),
    *without_effect(
        AI_TOOLKIT,
        BY_FAMILY,
        "noise_scheduler content_or_style min_denoising_steps max_denoising_steps noise_offset linear_timesteps "
        "bypass_guidance_embedding noise_multiplier weight_jitter",
        "train",
    ),
    *without_effect(AI_TOOLKIT, NO_LOSS, "loss_target diff_output_preservation", "train"),
    *without_effect(
        AI_TOOLKIT,
        "has no effect: what is trained is said by adapter, and text encoders are not",
        "train_unet train_text_encoder unet_lr text_encoder_lr",
        "train",
    ),
    *without_effect(AI_TOOLKIT, NO_CURVE, "lr_scheduler_params", "train"),
    *without_effect(
        AI_TOOLKIT, "has no effect: what a model predicts is read from its scheduler", "is_v_pred", "model"
    ),
    *without_effect(
        AI_TOOLKIT,
        BY_ITSELF,
        "unload_text_encoder xformers sdp merge_network_on_save start_step single_item_batching",
        "train",
    ),
    *without_effect(AI_TOOLKIT, ONE_PIPELINE, "vae_path", "model"),
    *without_effect(AI_TOOLKIT, BY_ITSELF, "dtype quantize_te qtype_te", "model"),
    *without_effect(AI_TOOLKIT, NO_OFFLOAD, "low_vram", "model"),
    *without_effect(AI_TOOLKIT, NO_ASSISTANT, "assistant_lora_path", "model"),
    *without_effect(
        AI_TOOLKIT,
        "has no effect: what an adapter is put on is said by adapter.targets",
        "conv conv_alpha network_kwargs",
        "network",
    ),
    *without_effect(AI_TOOLKIT, ONE_EXPORT, "dtype save_format", "save"),
    *without_effect(AI_TOOLKIT, NOT_UPLOADED, "push_to_hub hf_repo_id hf_private", "save"),
    *without_effect(
        AI_TOOLKIT, "has no effect: every prompt is sampled with every seed of validation.seeds", "walk_seed", "sample"
    ),
    *without_effect(AI_TOOLKIT, BY_FAMILY, "sampler guidance_rescale network_multiplier", "sample"),
    *without_effect(AI_TOOLKIT, "has no effect: samples are PNG files, and MP4 for videos", "format", "sample"),
    *without_effect(AI_TOOLKIT, "has no effect: a run has one name, run.name", "run_name", "logging"),
    *without_effect(AI_TOOLKIT, "has no effect: the run's log has every step", "verbose", "logging"),
    *without_effect(AI_TOOLKIT, "has no effect: the run's log has every step", "performance_log_every"),
    *without_effect(AI_TOOLKIT, "has no effect: there is one kind of job here", "type job meta"),
)

RUN = SIMPLETUNER_ROWS + AI_TOOLKIT_ROWS
