"""The one table of foreign names: what SimpleTuner and ai-toolkit call a setting, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from supertuner.config import conversions as to_ours
from supertuner.config.conversions import Convert, by_table, positive_or_unset, to, unless_null

SIMPLETUNER = "SimpleTuner"
AI_TOOLKIT = "ai-toolkit"

NO_MODEL = "has no effect yet: no model is loaded until the trainer lands"
NO_TRAINER = "has no effect yet: it is the trainer's, which has not landed"
NO_SAMPLES = "has no effect yet: samples come with the trainer"
NO_SAVES = "has no effect yet: checkpoints come with the trainer"
NOT_UPLOADED = "has no effect: nothing is uploaded or reported to a service"
NOT_NEEDED = "has no effect: staging does this by itself"
NO_PAIRS = "has no effect yet: paired and regularisation data come with the trainer"
NO_SIZES = "has no effect: no sample is left out for its size; `upscale: false` keeps small ones from being enlarged"


@dataclass(frozen=True, slots=True)
class Row:
    """One foreign key, its path relative to the root or to a dataset."""

    dialect: str
    written: str
    convert: Convert | None = None
    why: str = ""
    """Why it has no effect here, for a key that has none."""
    in_dialect_only: bool = False
    """The key means something else in our own tree: the row counts only where the dialect is certain."""


def _rows(dialect: str, table: Mapping[str, Convert]) -> Iterator[Row]:
    return (Row(dialect, written, convert) for written, convert in table.items())


def _without_effect(dialect: str, why: str, names: str, block: str = "") -> Iterator[Row]:
    return (Row(dialect, f"{block}.{name}".lstrip("."), why=why) for name in names.split())


RUN = (
    *_rows(
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
    *_without_effect(
        SIMPLETUNER,
        NO_MODEL,
        "pretrained_model_name_or_path pretrained_transformer_model_name_or_path model_family model_type model_flavour "
        "lora_type lora_rank lora_alpha lora_dropout lycoris_config init_lora base_model_precision quantize_via "
        "flow_schedule_shift flow_schedule_auto_shift attention_mechanism lora_format "
        "pretrained_vae_model_name_or_path pretrained_t5_model_name_or_path revision variant "
        "refiner_training fuse_qkv_projections",
    ),
    *_without_effect(
        SIMPLETUNER,
        NO_TRAINER,
        "use_ema ema_decay snr_gamma noise_offset vae_batch_size write_batch_size dataloader_prefetch optimizer_config "
        "gradient_checkpointing_interval gradient_precision lr_end lr_num_cycles lr_power train_text_encoder "
        "allow_tf32 offload_during_startup enable_group_offload group_offload_type group_offload_use_stream ramtorch "
        "dynamo_backend dynamo_mode vae_dtype vae_enable_tiling vae_enable_slicing keep_vae_loaded logging_dir",
    ),
    *_without_effect(
        SIMPLETUNER,
        NO_SAVES,
        "checkpointing_steps checkpoint_step_interval checkpointing_epochs checkpoints_total_limit "
        "resume_from_checkpoint",
    ),
    *_without_effect(
        SIMPLETUNER,
        NO_SAMPLES,
        "validation_seed validation_steps validation_step_interval validation_resolution validation_guidance "
        "validation_guidance_rescale validation_num_inference_steps validation_prompt validation_prompt_library "
        "validation_negative_prompt validation_torch_compile num_validation_images user_prompt_library",
    ),
    *_without_effect(
        SIMPLETUNER,
        NOT_UPLOADED,
        "push_to_hub push_checkpoints_to_hub push_to_hub_background hub_model_id report_to tracker_project_name "
        "publishing_config webhook_config disable_benchmark",
    ),
    *_without_effect(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *_without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "aspect_bucket_rounding compress_disk_cache preserve_data_backend_cache skip_file_discovery "
        "metadata_update_interval",
    ),
    *_rows(
        AI_TOOLKIT,
        {
            "name": to_ours.run_name,
            "training_folder": to("run.output_dir"),
            "train.steps": to("train.max_steps"),
            "train.lr": to("optimizer.learning_rate"),
            "train.optimizer": by_table("optimizer.name", to_ours.OPTIMIZERS),
            "train.dtype": by_table("train.mixed_precision", to_ours.PRECISIONS),
            "train.mixed_precision": by_table("train.mixed_precision", to_ours.PRECISIONS),
            "train.gradient_accumulation": to("train.gradient_accumulation_steps"),
            "train.lr_scheduler": by_table("optimizer.lr_scheduler", to_ours.SCHEDULERS),
            "train.cache_text_embeddings": to_ours.cache_to("text", "unified_memory"),
            "optimizer.name": by_table("optimizer.name", to_ours.OPTIMIZERS),
            "optimizer.lr": to("optimizer.learning_rate"),
        },
    ),
    *(
        Row(AI_TOOLKIT, f"train.optimizer_params.{stage}{name}", to(f"optimizer.{stage}{name}"))
        for stage in ("", "high_noise_", "low_noise_")
        for name in ("lr_bump", "min_lr", "max_lr")
    ),
    Row(AI_TOOLKIT, "train.optimizer_params.weight_decay", to("optimizer.weight_decay")),
    *_without_effect(
        AI_TOOLKIT,
        NO_TRAINER,
        "noise_scheduler timestep_type train_unet train_text_encoder ema_config content_or_style switch_boundary_every "
        "unload_text_encoder min_denoising_steps max_denoising_steps noise_offset snr_gamma min_snr_gamma loss_type "
        "linear_timesteps bypass_guidance_embedding lr_scheduler_params diff_output_preservation unet_lr "
        "text_encoder_lr xformers sdp weight_jitter merge_network_on_save start_step noise_multiplier "
        "single_item_batching loss_target",
        "train",
    ),
    *_without_effect(AI_TOOLKIT, NO_SAMPLES, "skip_first_sample disable_sampling force_first_sample", "train"),
    *_without_effect(
        AI_TOOLKIT,
        NO_MODEL,
        "name_or_path arch is_flux is_v3 is_v2 is_xl is_v_pred vae_path "
        "quantize qtype quantize_te qtype_te low_vram model_kwargs assistant_lora_path "
        "dtype",
        "model",
    ),
    *_without_effect(
        AI_TOOLKIT,
        NO_MODEL,
        "type rank alpha linear linear_alpha conv conv_alpha dropout lokr_factor lokr_full_rank network_kwargs",
        "network",
    ),
    *_without_effect(
        AI_TOOLKIT,
        NO_SAVES,
        "dtype save_every save_format max_step_saves_to_keep push_to_hub hf_repo_id hf_private",
        "save",
    ),
    *_without_effect(
        AI_TOOLKIT,
        NO_SAMPLES,
        "sampler sample_every width height num_frames fps prompts samples neg seed walk_seed guidance_scale "
        "guidance_rescale network_multiplier sample_steps format",
        "sample",
    ),
    *_without_effect(AI_TOOLKIT, NOT_UPLOADED, "log_every use_wandb project_name run_name verbose", "logging"),
    *_without_effect(AI_TOOLKIT, NO_TRAINER, "device performance_log_every"),
    *_without_effect(AI_TOOLKIT, "has no effect: there is one kind of job here", "type job meta"),
)

FOR_ALL_DATASETS = {
    SIMPLETUNER: {
        "resolution": "resolution",
        "resolution_type": "resolution_type",
        "caption_strategy": "caption_strategy",
        "instance_prompt": "instance_prompt",
        "prepend_instance_prompt": "prepend_instance_prompt",
        "only_instance_prompt": "only_instance_prompt",
        "caption_dropout_probability": "captions.dropout",
        "aspect_bucket_alignment": "bucket_step",
    },
    AI_TOOLKIT: {"trigger_word": "captions.trigger_word"},
}
"""Keys of the root that every dataset without its own inherits, under these names."""

DATASET = (
    *_rows(
        SIMPLETUNER,
        {
            "type": to_ours.backend_type,
            "disabled": to_ours.disabled,
            "disable": to_ours.disabled,
            "crop": to_ours.crop,
            "crop_style": to_ours.crop_style,
            "crop_aspect": to_ours.crop_aspect,
            "resolution_type": to_ours.resolution_type,
            "maximum_aspect_ratio": to("max_aspect_ratio"),
            "caption_strategy": to_ours.caption_strategy,
            "instance_prompt": to_ours.instance_prompt,
            "prepend_instance_prompt": to_ours.read_by("instance_prompt"),
            "only_instance_prompt": to_ours.read_by("instance_prompt"),
            "disable_multiline_split": to_ours.read_by("caption_strategy"),
            "caption_shuffle.enable": to("captions.shuffle_tags"),
            "caption_shuffle.position_start": to("captions.keep_tags"),
            "caption_shuffle.split_on": to_ours.split_on,
            "parquet.path": to("captions.metadata_file"),
            "parquet.filename_column": to("captions.file_column"),
            "parquet.caption_column": to("captions.caption_column"),
            "cache_dir_vae": to_ours.cache_dir,
            "cache_dir": to_ours.cache_dir,
            "vae_cache_clear_each_epoch": to_ours.refresh_each_epoch,
            "probability": to("weight"),
            "video.num_frames": to_ours.frames,
            "audio.max_duration_seconds": to("audio.max_seconds"),
            "audio.duration_interval": to("audio.step_seconds"),
        },
    ),
    Row(SIMPLETUNER, "id", to_ours.dataset_id, in_dialect_only=True),
    Row(SIMPLETUNER, "repeats", to_ours.repeats, in_dialect_only=True),
    Row(SIMPLETUNER, "resolution", to_ours.resolution, in_dialect_only=True),
    *_without_effect(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *_without_effect(
        SIMPLETUNER,
        "has no effect: samples of every shape are used, cropped to max_aspect_ratio",
        "minimum_aspect_ratio",
    ),
    *_without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "metadata_backend metadata_update_interval skip_file_discovery preserve_data_backend_cache crop_aspect_buckets "
        "text_embeds image_embeds default write_batch_size max_upscale_threshold hash_filenames vae_cache_ondemand",
    ),
    *_without_effect(SIMPLETUNER, NO_PAIRS, "conditioning_data conditioning is_regularisation_data"),
    *_without_effect(SIMPLETUNER, NOT_NEEDED, "min_frames max_frames is_i2v bucket_strategy frame_interval", "video"),
    *_without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "bucket_strategy truncation_mode auto_split allow_zero_audio source_from_video",
        "audio",
    ),
    *_without_effect(
        SIMPLETUNER,
        "has no effect: each epoch shuffles anew, from run.seed",
        "count seed include_original",
        "caption_shuffle",
    ),
    *_without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "width_column height_column fallback_caption_column identifier_includes_extension",
        "parquet",
    ),
    *_rows(
        AI_TOOLKIT,
        {
            "folder_path": to("instance_data_dir"),
            "dataset_path": to("instance_data_dir"),
            "caption_ext": to_ours.extension,
            "caption_dropout_rate": to("captions.dropout"),
            "shuffle_tokens": to("captions.shuffle_tags"),
            "keep_tokens": to("captions.keep_tags"),
            "trigger_word": to("captions.trigger_word"),
            "num_repeats": to("repeats"),
            "num_frames": to_ours.frames,
            "flip_x": to_ours.mirror,
            "random_crop": to_ours.random_crop,
            "bucket_tolerance": to("bucket_step"),
            "cache_latents_to_disk": to_ours.cache_to("vae", "disk", unless="cache_latents"),
            "cache_latents": to_ours.cache_to("vae", "unified_memory"),
            "cache_text_embeddings": to_ours.cache_to("text", "unified_memory"),
        },
    ),
    Row(AI_TOOLKIT, "resolution", to_ours.resolutions_each, in_dialect_only=True),
    Row(AI_TOOLKIT, "type", to_ours.folder_type, in_dialect_only=True),
    *_without_effect(
        AI_TOOLKIT,
        NOT_NEEDED,
        "buckets num_workers prefetch_factor augmentation_cache_epoch shrink_video_to_frames scale",
    ),
    *_without_effect(
        AI_TOOLKIT, NO_PAIRS, "is_reg prior_reg control_path mask_path mask_min_value alpha_mask network_weight"
    ),
    *_without_effect(AI_TOOLKIT, NO_TRAINER, "do_i2v default_caption token_dropout_rate random_triggers poi"),
    *_without_effect(
        AI_TOOLKIT,
        "has no effect: what is changed in a sample is set by the `augment` block",
        "augments augmentations shuffle_augmentations flip_y random_scale",
    ),
)


@cache
def run_rows() -> Mapping[str, Row]:
    """Rows of the root by their written path."""
    return {row.written: row for row in RUN}


@cache
def dataset_rows(dialect: str) -> Mapping[str, Row]:
    """Rows of a dataset entry that is read as `dialect` ("" where none is certain)."""
    table = {row.written: row for row in DATASET if not row.in_dialect_only}
    return table | {row.written: row for row in DATASET if row.in_dialect_only and row.dialect == dialect}


def inherited() -> Mapping[str, tuple[str, str]]:
    """Root keys that datasets inherit → (dialect, the name in the dataset)."""
    return {name: (dialect, inner) for dialect, table in FOR_ALL_DATASETS.items() for name, inner in table.items()}


def dialect_of(entry: Mapping[str, object]) -> str:
    """Whose dataset entry this is, by the first key that only one dialect has; "" if there is none."""
    shared = {"type", "crop", "audio"}
    rows = dataset_rows("")
    for name in entry:
        if name not in shared:
            for written, row in rows.items():
                if written == name or written.startswith(f"{name}."):
                    return row.dialect
    return ""
