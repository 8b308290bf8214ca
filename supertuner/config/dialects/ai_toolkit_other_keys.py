"""The keys of a run in ai-toolkit (commit 27a03a91, August 2026) that have no meaning here, with the reasons."""

from __future__ import annotations

from supertuner.config.dialects.dialect_keys import AI_TOOLKIT, OFF_VALUES, ignored_keys, refused_keys
from supertuner.config.dialects.reasons import (
    CHOSEN_BY_FAMILY,
    CHOSEN_BY_TRAINER,
    EXPORT_FORMAT,
    NO_ASSISTANT,
    NO_OFFLOAD,
    NO_SAMPLER_OPTION,
    NO_TEXT_TRAINING,
    ONE_PIPELINE,
    PLAIN_LOSS,
    PLAIN_NOISE,
    SAMPLED_NOISE_LEVELS,
    TEXT_ENCODER_PRECISION,
    TORCHAO,
)
from supertuner.config.dialects.simpletuner_other_keys import ON_BY_DEFAULT
from supertuner.core.types import JSON

OTHER_TRAINING = "is not available: here only the denoiser or an adapter of it is trained; remove this block"
NO_PRESERVATION = "has no effect: use a dataset with prior: true to keep what the model knows"
ALL_TARGETS = "has no effect: adapter.targets lists the layers that get an adapter"
NO_SUCH_TRAINING_TRICK = "has no effect: it is an experiment of ai-toolkit that is not available here"
LOGS = "has no effect: losses.jsonl has every step, and events.jsonl everything else"
NO_SUCH_OPTIMIZER_OPTION = "has no effect: the optimizer uses its package's own value"
COMPILED_BLOCKS = "has no effect: model.compile compiles the transformer blocks with inductor's default mode"


def _default(*values: JSON) -> tuple[JSON, ...]:
    return (*OFF_VALUES, *values)


AI_TOOLKIT_OTHER_KEYS = (
    *refused_keys(AI_TOOLKIT, OTHER_TRAINING, "embedding decorator slider do_lorm guidance"),
    *ignored_keys(AI_TOOLKIT, "has no effect without do_lorm", "lorm_extract_mode lorm_extract_mode_param"),
    *ignored_keys(AI_TOOLKIT, "has no effect: every validation uses the same settings", "first_sample"),
    *ignored_keys(AI_TOOLKIT, "has no effect: there is only one kind of job", "job", off=("extension", "train")),
    *ignored_keys(AI_TOOLKIT, "has no effect: the metadata of an export are the run's settings", "meta"),
    *ignored_keys(AI_TOOLKIT, LOGS, "performance_log_every log_dir torch_profiler"),
    *ignored_keys(AI_TOOLKIT, "has no effect: it belongs to ai-toolkit's web interface", "sqlite_db_path"),
    # train
    *ignored_keys(
        AI_TOOLKIT, CHOSEN_BY_FAMILY, "noise_scheduler", "train", off=_default("flowmatch", "ddpm", "euler", "ddim")
    ),
    *ignored_keys(
        AI_TOOLKIT,
        SAMPLED_NOISE_LEVELS,
        "content_or_style min_denoising_steps max_denoising_steps num_train_timesteps next_sample_timesteps",
        "train",
        off=_default("balanced", 999, 1000, 8),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: a model that has a guidance input always gets it; objective.guidance sets its value",
        "bypass_guidance_embedding",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        PLAIN_NOISE,
        "noise_offset dynamic_noise_offset noise_multiplier target_noise_multiplier random_noise_multiplier "
        "random_noise_shift do_signal_correction_noise signal_correction_noise_scale do_batch_noise_correction "
        "batch_noise_correction_scale do_signal_amplification signal_amplification_strength force_consistent_noise "
        "blended_blur_noise optimal_noise_pairing_samples match_noise_norm",
        "train",
        off=_default(1.0, 0.1, 0.5),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: images and latents are used as they are encoded",
        "img_multiplier noisy_latent_multiplier latent_multiplier adaptive_scaling_factor standardize_images "
        "standardize_latents",
        "train",
        off=_default(1.0),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        PLAIN_LOSS,
        "loss_target learnable_snr_gos correct_pred_norm correct_pred_norm_multiplier t0_loss_target "
        "t0_velocity_equiv_weight do_fft_loss do_fft_velocity_equiv_weight pred_scaler target_norm_std "
        "target_norm_std_value latent_feature_extractor_path latent_feature_loss_weight "
        "diffusion_feature_extractor_path diffusion_feature_extractor_weight audio_loss_multiplier",
        "train",
        off=_default("noise", 1.0),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: the model is trained on its targets, without guidance in the loss",
        "do_guidance_loss guidance_loss_target do_guidance_loss_cfg_zero guidance_loss_schedule unconditional_prompt "
        "do_differential_guidance differential_guidance_scale do_cfg do_random_cfg max_cfg_scale cfg_rescale "
        "negative_prompt max_negative_prompts do_blank_stabilization",
        "train",
        off=_default(1.0, 3.0, "constant"),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        NO_PRESERVATION,
        "diff_output_preservation blank_prompt_preservation inverted_mask_prior do_prior_divergence",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect without the switch that it belongs to",
        "diff_output_preservation_multiplier diff_output_preservation_class blank_prompt_preservation_multiplier "
        "inverted_mask_prior_multiplier",
        "train",
        off=_default(1.0, 0.5, "person"),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: loss_weight of a dataset is the factor of its loss",
        "reg_weight",
        "train",
        off=_default(1.0),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: windows with a loss that is not finite are skipped",
        "max_loss max_loss_debug",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: set captions.dropout of the datasets",
        "prompt_dropout_prob",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: a sample has one caption in each use; captions.several chooses among lines of a file",
        "short_and_long_captions short_and_long_captions_encoder_split prompt_saturation_chance",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        NO_TEXT_TRAINING,
        "train_text_encoder text_encoder_lr refiner_lr embedding_lr adapter_lr train_refiner unet_lr",
        "train",
        off=_default(True),
    ),
    *refused_keys(
        AI_TOOLKIT, "is not available: models are not distilled here; set it to false", "train_turbo", "train"
    ),
    *ignored_keys(AI_TOOLKIT, "has no effect without train_turbo", "show_turbo_outputs", "train"),
    *ignored_keys(
        AI_TOOLKIT,
        NO_SUCH_TRAINING_TRICK,
        "weight_jitter free_u do_paramiter_swapping paramiter_swapping_factor adapter_assist_name_or_path "
        "adapter_assist_type match_adapter_assist match_adapter_chance",
        "train",
        off=_default(0.1, "t2i"),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: `supertuner adapter merge` adds an adapter to its model",
        "merge_network_on_save merge_network_on_save_strength",
        "train",
        off=_default(1.0),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: a run starts at step 0, or continues from its checkpoint",
        "start_step",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: the text encoders are loaded only while captions are encoded, and every caption is used",
        "unload_text_encoder",
        "train",
    ),
    *ignored_keys(AI_TOOLKIT, CHOSEN_BY_TRAINER, "single_item_batching", "train"),
    *ignored_keys(AI_TOOLKIT, "has no effect: model.attention sets the attention backend", "xformers sdp", "train"),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: a dataset with held_out: true measures the loss at validation.held_out_levels",
        "validation_config",
        "train",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: the average changes nothing in the trained weights",
        "use_feedback param_multiplier",
        "train.ema_config",
        off=_default(1.0),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        NO_SUCH_OPTIMIZER_OPTION,
        "decouple use_bias_correction safeguard_warmup d_coef d0 beta3 growth_rate relative_step scale_parameter "
        "warmup_init clip_threshold decay_rate beta1 amsgrad momentum beta2 eta fused foreach",
        "train.optimizer_params",
        off=(),
    ),
    # model
    *ignored_keys(
        AI_TOOLKIT, "has no effect: the prediction type is read from the model's scheduler", "is_v_pred", "model"
    ),
    *ignored_keys(
        AI_TOOLKIT,
        ONE_PIPELINE,
        "vae_path unet_path te_name_or_path extras_name_or_path refiner_name_or_path model_paths latent_space_version",
        "model",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: samples use the base model alone",
        "refiner_start_at experimental_xl unet_sample_size in_context inference_lora_path unconditional_lora_path",
        "model",
        off=_default(0.5),
    ),
    *ignored_keys(AI_TOOLKIT, CHOSEN_BY_FAMILY, "use_flux_cfg attn_masking", "model"),
    *ignored_keys(AI_TOOLKIT, ONE_PIPELINE, "use_text_encoder_1 use_text_encoder_2", "model", off=ON_BY_DEFAULT),
    *ignored_keys(AI_TOOLKIT, NO_ASSISTANT, "assistant_lora_path", "model"),
    *ignored_keys(
        AI_TOOLKIT,
        TEXT_ENCODER_PRECISION,
        "quantize_te qtype_te text_encoder_bits te_dtype te_device",
        "model",
        off=_default(16),
    ),
    *ignored_keys(AI_TOOLKIT, "has no effect: train.mixed_precision is used", "dtype vae_dtype vae_device", "model"),
    *ignored_keys(
        AI_TOOLKIT,
        NO_OFFLOAD,
        "low_vram layer_offloading layer_offloading_transformer_percent layer_offloading_text_encoder_percent "
        "auto_memory split_model_over_gpus split_model_other_module_param_count_scale",
        "model",
        off=_default(0.3),
    ),
    *ignored_keys(AI_TOOLKIT, ALL_TARGETS, "ignore_if_contains only_if_contains", "model"),
    *ignored_keys(AI_TOOLKIT, TORCHAO, "quantize_kwargs", "model"),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: 8-bit weights need no accuracy recovery adapter",
        "accuracy_recovery_adapter",
        "model",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        COMPILED_BLOCKS,
        "compile_mode compile_fullgraph compile_dynamic cache_size_limit",
        "model",
        off=_default("default", True),
    ),
    # network
    *ignored_keys(
        AI_TOOLKIT,
        'has no effect: only SDXL has convolutions; adapter.targets: "all_layers" trains them with the same rank',
        "conv conv_alpha",
        "network",
        off=(None, 0),
    ),
    *ignored_keys(AI_TOOLKIT, ALL_TARGETS, "all_layers", "network"),
    *ignored_keys(AI_TOOLKIT, ALL_TARGETS, "transformer_only", "network", off=ON_BY_DEFAULT),
    *ignored_keys(
        AI_TOOLKIT,
        ALL_TARGETS,
        "ignore_if_contains only_if_contains ignore_if_not_contains",
        "network.network_kwargs",
    ),
    *ignored_keys(AI_TOOLKIT, NO_OFFLOAD, "layer_offloading", "network"),
    *ignored_keys(
        AI_TOOLKIT, "has no effect: `supertuner adapter convert` writes other names", "old_lokr_format", "network"
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: each expert has a file of its own",
        "split_multistage_loras",
        "network",
        off=ON_BY_DEFAULT,
    ),
    *refused_keys(AI_TOOLKIT, "is not available: LoRM is not trained here; remove this block", "lorm", "network"),
    # save, sample, logging
    *ignored_keys(AI_TOOLKIT, EXPORT_FORMAT, "save_format", "save", off=_default("diffusers", "safetensors")),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: adapters are exported in the precision in which they are trained, fp32",
        "dtype",
        "save",
        off=_default("fp32", "float32"),
    ),
    *ignored_keys(
        AI_TOOLKIT, "has no effect: every prompt is sampled with every seed of validation.seeds", "walk_seed", "sample"
    ),
    *ignored_keys(
        AI_TOOLKIT,
        NO_SAMPLER_OPTION,
        "sampler guidance_rescale network_multiplier adapter_conditioning_scale refiner_start_at extra_values "
        "do_cfg_norm",
        "sample",
        off=_default("flowmatch", "ddpm", 1.0, 0.5),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: validation.every_steps counts from the first step",
        "sample_start_step",
        "sample",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: samples are PNG files, and MP4 for videos",
        "format ext",
        "sample",
        off=_default("png"),
    ),
    *ignored_keys(AI_TOOLKIT, "has no effect: a run has one name, run.name", "run_name", "logging"),
    *ignored_keys(AI_TOOLKIT, LOGS, "verbose", "logging"),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: the run folder holds all figures, and TensorBoard shows them",
        "use_ui_logger",
        "logging",
    ),
)
