"""Foreign keys of datasets: what SimpleTuner and ai-toolkit call a dataset's setting, and what becomes of it here."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects.conversions import to, unless_null
from supertuner.config.dialects.rows import AI_TOOLKIT, SIMPLETUNER, Row, rows, without_effect

NOT_NEEDED = "has no effect: staging does this by itself"
NO_PAIRS = "has no effect yet: paired data come later"
NO_REG = "has no effect: a dataset of regularisation is one like others; prior and loss_weight say what it is for"
NO_SIZES = "has no effect: no sample is left out for its size; `upscale: false` keeps small ones from being enlarged"

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
    *rows(
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
            "is_regularisation_data": to("prior"),
            "video.num_frames": to_ours.frames,
            "audio.max_duration_seconds": to("audio.max_seconds"),
            "audio.duration_interval": to("audio.step_seconds"),
        },
    ),
    Row(SIMPLETUNER, "id", to_ours.dataset_id, in_dialect_only=True),
    Row(SIMPLETUNER, "repeats", to_ours.repeats, in_dialect_only=True),
    Row(SIMPLETUNER, "resolution", to_ours.resolution, in_dialect_only=True),
    *without_effect(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *without_effect(
        SIMPLETUNER,
        "has no effect: samples of every shape are used, cropped to max_aspect_ratio",
        "minimum_aspect_ratio",
    ),
    *without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "metadata_backend metadata_update_interval skip_file_discovery preserve_data_backend_cache crop_aspect_buckets "
        "text_embeds image_embeds default write_batch_size max_upscale_threshold hash_filenames vae_cache_ondemand",
    ),
    *without_effect(SIMPLETUNER, NO_PAIRS, "conditioning_data conditioning"),
    *without_effect(SIMPLETUNER, NOT_NEEDED, "min_frames max_frames is_i2v bucket_strategy frame_interval", "video"),
    *without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "bucket_strategy truncation_mode auto_split allow_zero_audio source_from_video",
        "audio",
    ),
    *without_effect(
        SIMPLETUNER,
        "has no effect: each epoch shuffles anew, from run.seed",
        "count seed include_original",
        "caption_shuffle",
    ),
    *without_effect(
        SIMPLETUNER,
        NOT_NEEDED,
        "width_column height_column fallback_caption_column identifier_includes_extension",
        "parquet",
    ),
    *rows(
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
            "control_path": unless_null("conditioning_dir"),
            "mask_path": unless_null("mask_dir"),
            "mask_min_value": to_ours.mask_floor,
            "prior_reg": to("prior"),
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
    *without_effect(
        AI_TOOLKIT,
        NOT_NEEDED,
        "buckets num_workers prefetch_factor augmentation_cache_epoch shrink_video_to_frames scale",
    ),
    *without_effect(AI_TOOLKIT, NO_PAIRS, "alpha_mask network_weight"),
    *without_effect(AI_TOOLKIT, NO_REG, "is_reg"),
    *without_effect(AI_TOOLKIT, "has no effect: the model says whether it starts from an image", "do_i2v"),
    *without_effect(
        AI_TOOLKIT, "has no effect: see the captions block", "default_caption token_dropout_rate random_triggers poi"
    ),
    *without_effect(
        AI_TOOLKIT,
        "has no effect: what is changed in a sample is set by the `augment` block",
        "augments augmentations shuffle_augmentations flip_y random_scale",
    ),
)
