"""The keys of a run in SimpleTuner v4.8.0 that have no meaning here, with the reasons."""

from __future__ import annotations

from typing import Final

from supertuner.config.dialects.dataset_keys import NEVER_DELETED, NO_NSFW_CHECK, NO_SIZES, NOT_NEEDED
from supertuner.config.dialects.dialect_keys import OFF_VALUES, SIMPLETUNER, DialectKey, ignored_keys, refused_keys
from supertuner.config.dialects.model_conversions import ONE_GUIDANCE
from supertuner.config.dialects.reasons import (
    ADAPTER_START,
    ALL_TOKENS,
    ALWAYS_ON_REQUEST,
    BY_LAUNCHER,
    BY_STEPS,
    CHOSEN_BY_FAMILY,
    CHOSEN_BY_TRAINER,
    CONTROLNETS,
    DISTILLATION,
    EDITED_CARD,
    FAMILY_KEYS,
    FORM_STATE,
    NO_ASSISTANT,
    NO_EVALUATION,
    NO_OFFLOAD,
    NO_PROMPT_LIBRARY,
    NO_SAMPLER_OPTION,
    NO_TEXT_TRAINING,
    NOT_NOTIFIED,
    NOT_SHARDED_SO,
    ONE_PIPELINE,
    ONE_RUN_FOLDER,
    OTHER_PURPOSE,
    PLAIN_LOSS,
    PLAIN_NOISE,
    PUSHED_AT_END,
    SAMPLED_NOISE_LEVELS,
    TEXT_ENCODER_PRECISION,
    TOKEN_IN_FILE,
    TORCHAO,
)
from supertuner.core.types import JSON

ON_BY_DEFAULT: Final[tuple[JSON, ...]] = (None, True)
ONE: Final[tuple[JSON, ...]] = (None, 1, False)
PRECISION_KEPT: Final[tuple[JSON, ...]] = (None, "", "no_change")


def _default(*values: JSON) -> tuple[JSON, ...]:
    """Values that need no note: those that ask for nothing, and SimpleTuner's defaults."""
    return (*OFF_VALUES, *values)


def _family_keys() -> tuple[DialectKey, ...]:
    return tuple(
        row
        for family, names in FAMILY_KEYS.items()
        for row in ignored_keys(SIMPLETUNER, f'has no effect: only SimpleTuner\'s family "{family}" has it', names)
    )


SIMPLETUNER_OTHER_KEYS = (
    *_family_keys(),
    *ignored_keys(
        SIMPLETUNER,
        ONE_PIPELINE,
        "pretrained_transformer_model_name_or_path pretrained_vae_model_name_or_path pretrained_t5_model_name_or_path "
        "pretrained_unet_model_name_or_path pretrained_gemma_model_name_or_path qwen_text_encoder_model_name_or_path",
    ),
    *ignored_keys(SIMPLETUNER, ONE_PIPELINE, "pretrained_transformer_subfolder", off=_default("transformer")),
    *ignored_keys(SIMPLETUNER, ONE_PIPELINE, "pretrained_unet_subfolder", off=_default("unet")),
    *ignored_keys(SIMPLETUNER, "has no effect: no code of a model repository is run", "trust_remote_code"),
    *ignored_keys(SIMPLETUNER, "has no effect: downloaded models stay in the hub's cache", "delete_model_after_load"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: the prediction type and the noise schedule are read from the model's scheduler",
        "prediction_type rescale_betas_zero_snr training_scheduler_timestep_spacing t5_padding",
        off=_default("trailing", "unmodified"),
    ),
    # What is trained
    *refused_keys(SIMPLETUNER, CONTROLNETS, "controlnet control"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: ControlNets are not trained here",
        "controlnet_custom_config controlnet_model_name_or_path ramtorch_controlnet",
    ),
    *refused_keys(SIMPLETUNER, DISTILLATION, "distillation_method"),
    *ignored_keys(SIMPLETUNER, "has no effect without distillation", "distillation_config"),
    *refused_keys(SIMPLETUNER, OTHER_PURPOSE, "twinflow_enabled mixflow_enabled slider_lora_target"),
    *refused_keys(SIMPLETUNER, OTHER_PURPOSE, "layer_freeze_strategy"),
    *ignored_keys(SIMPLETUNER, "has no effect without twinflow_enabled", "twinflow_target_step_count", off=ONE),
    *ignored_keys(SIMPLETUNER, "has no effect without mixflow_enabled", "mixflow_gamma", off=_default(0.8)),
    *ignored_keys(SIMPLETUNER, NO_TEXT_TRAINING, "train_text_encoder text_encoder_lr save_text_encoder"),
    *ignored_keys(SIMPLETUNER, NO_TEXT_TRAINING, "text_encoder_limit", off=_default(100)),
    *ignored_keys(
        SIMPLETUNER,
        NO_ASSISTANT,
        "assistant_lora_path assistant_lora_inference_strength disable_assistant_lora",
    ),
    *ignored_keys(SIMPLETUNER, NO_ASSISTANT, "assistant_lora_strength", off=ONE),
    *ignored_keys(SIMPLETUNER, ADAPTER_START, "init_lokr_norm lora_init_type", off=_default("default")),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: init_lora sets only the first values of the adapter; steps and averages start from zero",
        "init_lora_ema init_lora_step",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: SingLoRA is not available; a LoRA is trained",
        "peft_lora_mode",
        off=_default("standard"),
    ),
    *ignored_keys(SIMPLETUNER, "has no effect without SingLoRA", "singlora_ramp_up_steps"),
    # Objective
    *ignored_keys(SIMPLETUNER, CHOSEN_BY_FAMILY, "refiner_training refiner_training_invert_schedule"),
    *ignored_keys(
        SIMPLETUNER, "has no effect without refiner_training", "refiner_training_strength", off=_default(0.2)
    ),
    *ignored_keys(SIMPLETUNER, CHOSEN_BY_FAMILY, "sdxl_refiner_uses_full_range wan_force_2_1_time_embedding"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: attention covers padded tokens as in the published models",
        "flux_attention_masked_training",
    ),
    *ignored_keys(SIMPLETUNER, SAMPLED_NOISE_LEVELS, "flux_fast_schedule flow_use_beta_schedule flow_custom_timesteps"),
    *ignored_keys(SIMPLETUNER, SAMPLED_NOISE_LEVELS, "flow_cubic_schedule_weights disable_segmented_timestep_sampling"),
    *ignored_keys(
        SIMPLETUNER, SAMPLED_NOISE_LEVELS, "flow_beta_schedule_alpha flow_beta_schedule_beta", off=_default(2.0)
    ),
    *ignored_keys(SIMPLETUNER, SAMPLED_NOISE_LEVELS, "flow_timesteps_mode", off=_default("fixed-list")),
    *ignored_keys(SIMPLETUNER, SAMPLED_NOISE_LEVELS, "timestep_bias_strategy"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect without timestep_bias_strategy",
        "timestep_bias_begin timestep_bias_end timestep_bias_multiplier timestep_bias_portion",
        off=_default(1000, 1.0, 0.25),
    ),
    *ignored_keys(SIMPLETUNER, ONE_GUIDANCE, "flux_guidance_min flux_guidance_max", off=_default(4.0)),
    *ignored_keys(SIMPLETUNER, PLAIN_NOISE, "noise_offset offset_noise input_perturbation input_perturbation_steps"),
    *ignored_keys(SIMPLETUNER, PLAIN_NOISE, "noise_offset_probability", off=_default(0.25)),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: objective.weighting has min_snr with a hard limit, and weights the whole loss",
        "use_soft_min_snr soft_min_snr_sigma_data snr_weight",
        off=_default(1.0),
    ),
    *ignored_keys(
        SIMPLETUNER, "has no effect: a mask applies to every use of a sample", "masked_loss_probability", off=ONE
    ),
    *ignored_keys(SIMPLETUNER, PLAIN_LOSS, "diff2flow_enabled diff2flow_loss"),
    *ignored_keys(
        SIMPLETUNER,
        PLAIN_LOSS,
        "crepa_enabled crepa_drop_vae_encoder crepa_self_flow crepa_use_backbone_features crepa_use_tae irepa_enabled "
        "layersync_enabled internal_guidance_enabled urepa_enabled urepa_use_tae",
    ),
    *(
        DialectKey(SIMPLETUNER, name, reason=f"has no effect without {switch}", off_values=_default())
        for switch, names in {
            "crepa_enabled": "crepa_adjacent_distance crepa_adjacent_tau crepa_block_index crepa_cutoff_step "
            "crepa_decay_steps crepa_encoder crepa_encoder_frames_batch_size crepa_encoder_image_size "
            "crepa_feature_source crepa_lambda crepa_lambda_end crepa_normalize_by_frames "
            "crepa_normalize_neighbour_sum crepa_power crepa_scheduler crepa_self_flow_mask_ratio "
            "crepa_similarity_ema_decay crepa_similarity_threshold crepa_spatial_align crepa_teacher_block_index "
            "crepa_threshold_mode crepa_warmup_steps",
            "irepa_enabled": "irepa_projector_kernel_size irepa_spatial_norm_alpha",
            "layersync_enabled": "layersync_lambda layersync_student_block layersync_teacher_block",
            "internal_guidance_enabled": "internal_guidance_block_index internal_guidance_loss_weight "
            "validation_internal_guidance_scale",
            "urepa_enabled": "urepa_cutoff_step urepa_decay_steps urepa_encoder_image_size urepa_lambda "
            "urepa_lambda_end urepa_manifold_weight urepa_model urepa_power urepa_scheduler "
            "urepa_similarity_ema_decay urepa_similarity_threshold urepa_threshold_mode urepa_warmup_steps",
            "scheduled_sampling_max_step_offset": "scheduled_sampling_order scheduled_sampling_prob_end "
            "scheduled_sampling_prob_start scheduled_sampling_probability scheduled_sampling_ramp_shape "
            "scheduled_sampling_ramp_steps scheduled_sampling_reflexflow scheduled_sampling_reflexflow_alpha "
            "scheduled_sampling_reflexflow_beta1 scheduled_sampling_reflexflow_beta2 scheduled_sampling_sampler "
            "scheduled_sampling_start_step scheduled_sampling_strategy",
        }.items()
        for name in names.split()
    ),
    *ignored_keys(SIMPLETUNER, PLAIN_NOISE, "scheduled_sampling_max_step_offset"),
    *ignored_keys(SIMPLETUNER, ALL_TOKENS, "tread_config diffusion_blocks_config sla_config"),
    # Optimizer
    *ignored_keys(SIMPLETUNER, "has no effect: learning_rate is used as it is written", "lr_scale lr_scale_sqrt"),
    *ignored_keys(SIMPLETUNER, "has no effect on this schedule, in SimpleTuner as well", "lr_num_cycles", off=ONE),
    *ignored_keys(SIMPLETUNER, "has no effect: Prodigy adapts its learning rate during the whole run", "prodigy_steps"),
    *ignored_keys(SIMPLETUNER, "has no effect: the average starts with the first step", "ema_warmup_steps"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: averages are kept where the plan puts the trained weights",
        "ema_cpu_only ema_device ema_foreach_disable",
        off=_default("cpu", "accelerator"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: samples are generated with the averaged weights",
        "ema_validation",
        off=_default("ema_only"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        CHOSEN_BY_TRAINER,
        "vae_batch_size write_batch_size read_batch_size image_processing_batch_size dataloader_prefetch "
        "gradient_checkpointing_interval gradient_checkpointing_segment_stride allow_tf32 disable_tf32 dynamo_mode "
        "vae_dtype vae_enable_tiling vae_enable_slicing vae_enable_patch_conv vae_enable_temporal_roll keep_vae_loaded "
        "validation_torch_compile set_grads_to_none fuse_optimizer find_unused_parameters dynamo_dynamic "
        "dynamo_fullgraph dynamo_use_regional_compilation unet_attention_slice accelerator_cache_clear_interval "
        "text_encoder_batch_size conditioning_multidataset_sampling",
        off=_default("no", 1, "random"),
    ),
    *ignored_keys(SIMPLETUNER, CHOSEN_BY_TRAINER, "fuse_qkv_projections fused_qkv_projections"),
    *ignored_keys(SIMPLETUNER, CHOSEN_BY_TRAINER, "gradient_precision", off=_default("unmodified", "fp32")),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: the number of threads follows from the CPUs of this process; loader.num_workers sets those "
        "that decode",
        "torch_num_threads aspect_bucket_worker_count enable_multiprocessing",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: SageAttention has no backward pass; model.attention is used for training and samples",
        "sageattention_usage",
        off=_default("inference"),
    ),
    # Memory
    *ignored_keys(
        SIMPLETUNER,
        NO_OFFLOAD,
        "offload_during_startup offload_during_save offload_param_path enable_group_offload group_offload_type "
        "group_offload_use_stream group_offload_blocks_per_group group_offload_text_encoder group_offload_to_disk_path "
        "group_offload_vae ramtorch ramtorch_disable_extensions ramtorch_disable_sync_hooks ramtorch_target_modules "
        "ramtorch_text_encoder ramtorch_text_encoder_percent ramtorch_transformer_percent ramtorch_vae "
        "musubi_blocks_to_swap musubi_block_swap_device optimizer_cpu_offload_method optimizer_offload_gradients "
        "optimizer_release_gradients gradient_checkpointing_backend gradient_checkpointing_offload_attention "
        "gradient_checkpointing_offload_pin_memory_max_buckets gradient_checkpointing_offload_prefetch "
        "enable_chunked_feed_forward feed_forward_chunk_size fully_unload_text_encoder",
        off=_default("torch", "cpu"),
    ),
    *ignored_keys(
        SIMPLETUNER, TORCHAO, "quantize_via quantization_config quantize_activations base_model_default_dtype"
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: torchao quantizes frozen weights to model.base_weights, not SDNQ",
        "sdnq_compile_mode sdnq_dequantize_fp32 sdnq_group_size sdnq_hadamard_group_size sdnq_modules_dtype_dict "
        "sdnq_modules_quant_config sdnq_modules_to_not_convert sdnq_modules_to_not_use_matmul "
        "sdnq_quantized_matmul_dtype sdnq_svd_rank sdnq_svd_steps sdnq_use_hadamard sdnq_use_quantized_matmul "
        "sdnq_use_static_quantization sdnq_use_stochastic_rounding sdnq_use_svd sdnq_weights_dtype",
        off=_default("auto"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        TEXT_ENCODER_PRECISION,
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision",
        off=PRECISION_KEPT,
    ),
    # Processes
    *ignored_keys(
        SIMPLETUNER,
        BY_LAUNCHER,
        "num_processes num_machines machine_rank main_process_ip main_process_port local_rank accelerate_config "
        "accelerate_extra_args",
        off=_default(1, -1, "127.0.0.1", 29500),
    ),
    *ignored_keys(SIMPLETUNER, BY_LAUNCHER, "same_network", off=ON_BY_DEFAULT),
    *ignored_keys(
        SIMPLETUNER,
        NOT_SHARDED_SO,
        "fsdp_activation_checkpointing fsdp_auto_wrap_policy fsdp_cpu_ram_efficient_loading fsdp_state_dict_type "
        "fsdp_transformer_layer_cls_to_wrap fsdp_version",
        off=_default("TRANSFORMER_BASED_WRAP", "SHARDED_STATE_DICT", 2),
    ),
    *ignored_keys(SIMPLETUNER, NOT_SHARDED_SO, "fsdp_limit_all_gathers", off=ON_BY_DEFAULT),
    *ignored_keys(
        SIMPLETUNER,
        'has no effect: DeepSpeed is not used; parallel.strategy: "fsdp" shards the model',
        "deepspeed_config",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: a sample is computed by one rank; there is no context parallelism",
        "context_parallel_size context_parallel_comm_strategy",
        off=_default(1, "allgather"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: random numbers are functions of run.seed and the sample, the same on any number of ranks",
        "seed_for_each_device",
        off=ON_BY_DEFAULT,
    ),
    # Checkpoints, exports and reports
    *ignored_keys(SIMPLETUNER, BY_STEPS, "checkpointing_epochs checkpoint_epoch_interval validation_epoch_interval"),
    *ignored_keys(SIMPLETUNER, BY_STEPS, "eval_epoch_interval validate_after_epoch validate_after_step"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: checkpoints.every_steps and checkpoints.keep are the only series of checkpoints",
        "checkpointing_rolling_steps checkpoints_rolling_total_limit",
        off=_default(1),
    ),
    *ignored_keys(SIMPLETUNER, ONE_RUN_FOLDER, "checkpointing_use_tempdir delete_invalid_checkpoints"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: `supertuner estimate` forecasts the disk space that checkpoints need",
        "disk_low_threshold disk_low_action disk_low_script",
        off=_default("stop"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: no scripts are run; follow events.jsonl in the run folder",
        "post_checkpoint_script post_upload_script validation_external_script validation_external_background",
    ),
    *ignored_keys(SIMPLETUNER, NOT_NOTIFIED, "publishing_config webhook_config webhook_reporting_interval"),
    *ignored_keys(SIMPLETUNER, PUSHED_AT_END, "push_checkpoints_to_hub push_to_hub_background"),
    *ignored_keys(SIMPLETUNER, EDITED_CARD, "model_card_note model_card_safe_for_work"),
    *refused_keys(SIMPLETUNER, TOKEN_IN_FILE, "hub_token hf_token"),
    *ignored_keys(SIMPLETUNER, "has no effect: the metadata of an export are the run's settings", "modelspec_comment"),
    *ignored_keys(SIMPLETUNER, "has no effect: logs are in the run folder", "logging_dir"),
    *ignored_keys(SIMPLETUNER, "has no effect: reports go to TensorBoard and wandb", "custom_tracker"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: samples are shown as single images",
        "tracker_image_layout",
        off=_default("gallery"),
    ),
    # Validation
    *ignored_keys(
        SIMPLETUNER,
        NO_SAMPLER_OPTION,
        "validation_guidance_rescale validation_guidance_real validation_noise_scheduler "
        "validation_no_cfg_until_timestep validation_guidance_skip_layers validation_guidance_skip_layers_start "
        "validation_guidance_skip_layers_stop validation_guidance_skip_scale inference_scheduler_timestep_spacing "
        "sdxl_validation_pipeline_mode sdxl_validation_stage1_model sdxl_validation_stage2_model "
        "sd3_clip_uncond_behaviour sd3_t5_uncond_behaviour",
        off=_default(1.0, 2, 0.01, 0.2, 2.8, "trailing", "trained-stage", "empty_string"),
    ),
    *ignored_keys(SIMPLETUNER, ALWAYS_ON_REQUEST, "enable_manual_validation"),
    *ignored_keys(SIMPLETUNER, NO_PROMPT_LIBRARY, "validation_prompt_library user_prompt_library"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: only the prompts are sampled; validation.prompts may contain an empty one",
        "validation_disable_unconditional",
        off=_default(True),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: seeds are the same at every validation, so that samples can be compared",
        "validation_randomize validation_seed_source",
        off=_default("cpu"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: samples show the trained adapter at full strength",
        "validation_lycoris_strength validation_adapter_strength validation_adapter_config validation_adapter_mode "
        "validation_adapter_name validation_adapter_path",
        off=_default(1.0, "adapter_only"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: samples start from noise; models that need an image take it from the data",
        "validation_input validation_using_datasets validation_stitch_input_location",
        off=_default("left"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: samples are PNG files, and MP4 for videos, written when they are complete",
        "validation_image_format validation_image_quality validation_preview validation_preview_steps enable_watermark",
        off=_default("png", 90, 1),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: validation runs inside the job",
        "validation_method",
        off=_default("simpletuner-local"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: rank 0 generates the samples; with FSDP, all ranks do",
        "validation_multigpu",
        off=_default("single-gpu", "batch-parallel"),
    ),
    *ignored_keys(
        SIMPLETUNER, "has no effect: samples use all experts of the model", "wan_validation_load_other_stage"
    ),
    *ignored_keys(
        SIMPLETUNER,
        NO_EVALUATION,
        "evaluation_type num_eval_images pretrained_evaluation_model_name_or_path eval_dataset_id eval_dataset_pooling "
        "eval_loss_disable eval_timesteps",
        off=_default(28),
    ),
    # Data
    *ignored_keys(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *ignored_keys(SIMPLETUNER, NO_SIZES, "max_upscale_threshold"),
    *ignored_keys(
        SIMPLETUNER,
        NOT_NEEDED,
        "compress_disk_cache preserve_data_backend_cache skip_file_discovery metadata_update_interval "
        "aspect_bucket_rounding aspect_bucket_disable_rebuild override_dataset_config vae_cache_ondemand "
        "text_cache_ondemand text_embed_full_cache vae_cache_preprocess vae_cache_scan_behaviour ignore_missing_files "
        "allow_dataset_oversubscription",
        off=_default(2, "recreate", True),
    ),
    *ignored_keys(SIMPLETUNER, NEVER_DELETED, "delete_problematic_images delete_unwanted_images delete_nsfw_images"),
    *ignored_keys(SIMPLETUNER, NO_NSFW_CHECK, "enable_nsfw_check"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect without enable_nsfw_check",
        "nsfw_check_backend_types nsfw_check_min_votes nsfw_check_models nsfw_check_sample_types "
        "nsfw_check_video_frame_count nsfw_check_video_frame_selection nsfw_check_video_min_flagged_frames",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: datasets are used by their size, repeats and weight",
        "data_backend_sampling",
        off=_default("auto-weighting"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: `supertuner preview` shows samples and buckets, and set_aside.jsonl the files set aside",
        "debug_aspect_buckets debug_dataset_loader print_filenames print_sampler_statistics",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: set audio.channels, audio.max_seconds and audio.step_seconds of the dataset",
        "audio_channels audio_duration_interval audio_max_duration_seconds audio_min_duration_seconds "
        "audio_truncation_mode",
        off=_default(1, 3.0, "beginning"),
    ),
    *ignored_keys(
        SIMPLETUNER, "has no effect: datasets are folders and archives on this machine", "aws_max_pool_connections"
    ),
    *ignored_keys(
        SIMPLETUNER, "has no effect: captions are as long as the family's text encoders allow", "tokenizer_max_length"
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: SDXL gets the true sizes and no aesthetic score",
        "data_aesthetic_score",
        off=_default(7.0),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: bounding boxes are not used",
        "max_grounding_entities pretrained_grounding_model_name_or_path",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect at the root, in SimpleTuner as well: set it in a dataset",
        "repeats aspect_ratio_bucketing aspect_ratio_bucket_min aspect_ratio_bucket_max",
    ),
    # Others
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: of train.max_steps and train.num_epochs, the first to be reached ends the run",
        "strict_epoch_limit ignore_final_epochs",
        off=_default(True),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: there are no limits to unlock; unwise settings get a note",
        "i_know_what_i_am_doing help",
    ),
    *ignored_keys(
        SIMPLETUNER,
        FORM_STATE,
        "__active_tab__ __disabled_fields__ ez_model_type configs_dir merge_environment_config _metadata",
    ),
)
