"""The keys of datasets in SimpleTuner and ai-toolkit, and their conversions."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects.conversions import rename_to, unless_null
from supertuner.config.dialects.dialect_keys import AI_TOOLKIT, SIMPLETUNER, DialectKey, converted_keys, ignored_keys

NOT_NEEDED = "has no effect: staging does this automatically"
PAIRED_DATA = (
    "has no effect: set conditioning_dir to a folder of reference images, or mask_dir to a folder of masks; "
    "their files are named like the samples"
)
NO_REG = "has no effect: set prior: true for prior preservation, or loss_weight to weight the dataset"
NO_SIZES = "has no effect: samples of all sizes are used; set upscale: false to keep small ones from being enlarged"
NO_ASPECT_RATIOS = "has no effect: samples of every aspect ratio are used, cropped to max_aspect_ratio"
NO_ALPHA_MASK = (
    "has no effect: alpha channels are not read as masks; set mask_dir to a folder of masks named like the samples"
)
NO_STRENGTH = "has no effect: an adapter is trained at full strength on every dataset; loss_weight weights a dataset"
SEEDED_SHUFFLE = "has no effect: tags are shuffled in each epoch, seeded by run.seed"
NO_FALLBACK_CAPTION = "has no effect: captions.constant gives all samples one caption; there is none for some samples"
NO_TAG_CHANGES = "has no effect: captions has dropout (of whole captions), trigger_word and shuffle_tags"
NO_SUCH_AUGMENTATION = "has no effect: the augment block lists the available augmentations"
AUDIO_KEYS = "bucket_strategy truncation_mode auto_split allow_zero_audio source_from_video"
PARQUET_KEYS = "width_column height_column fallback_caption_column identifier_includes_extension"
AI_TOOLKIT_STAGING_KEYS = "buckets num_workers prefetch_factor augmentation_cache_epoch shrink_video_to_frames scale"

_SAME_NAME = ("resolution", "resolution_type", "caption_strategy", "instance_prompt", "prepend_instance_prompt")
INHERITED_ROOT_KEYS = {
    SIMPLETUNER: {
        **{name: name for name in (*_SAME_NAME, "only_instance_prompt")},
        "caption_dropout_probability": "captions.dropout",
        "aspect_bucket_alignment": "bucket_step",
    },
    AI_TOOLKIT: {"trigger_word": "captions.trigger_word"},
}
"""Keys of the root that apply to every dataset without that key, and their names in the dataset."""

DATASET_KEYS = (
    *converted_keys(
        SIMPLETUNER,
        {
            "type": to_ours.backend_type,
            "disabled": to_ours.disabled,
            "disable": to_ours.disabled,
            "crop": to_ours.crop,
            "crop_style": to_ours.crop_style,
            "crop_aspect": to_ours.crop_aspect,
            "resolution_type": to_ours.resolution_type,
            "maximum_aspect_ratio": rename_to("max_aspect_ratio"),
            "caption_strategy": to_ours.caption_strategy,
            "instance_prompt": to_ours.instance_prompt,
            "prepend_instance_prompt": to_ours.used_by_key("instance_prompt"),
            "only_instance_prompt": to_ours.used_by_key("instance_prompt"),
            "disable_multiline_split": to_ours.used_by_key("caption_strategy"),
            "caption_shuffle.enable": rename_to("captions.shuffle_tags"),
            "caption_shuffle.position_start": rename_to("captions.keep_tags"),
            "caption_shuffle.split_on": to_ours.split_on,
            "parquet.path": rename_to("captions.metadata_file"),
            "parquet.filename_column": rename_to("captions.file_column"),
            "parquet.caption_column": rename_to("captions.caption_column"),
            "cache_dir_vae": to_ours.cache_dir,
            "cache_dir": to_ours.cache_dir,
            "vae_cache_clear_each_epoch": to_ours.refresh_each_epoch,
            "probability": rename_to("weight"),
            "is_regularisation_data": rename_to("prior"),
            "video.num_frames": to_ours.frames,
            "audio.max_duration_seconds": rename_to("audio.max_seconds"),
            "audio.duration_interval": rename_to("audio.step_seconds"),
        },
    ),
    DialectKey(SIMPLETUNER, "id", to_ours.dataset_id, in_dialect_only=True),
    DialectKey(SIMPLETUNER, "repeats", to_ours.repeats, in_dialect_only=True),
    DialectKey(SIMPLETUNER, "resolution", to_ours.resolution, in_dialect_only=True),
    *ignored_keys(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *ignored_keys(SIMPLETUNER, NO_ASPECT_RATIOS, "minimum_aspect_ratio"),
    *ignored_keys(
        SIMPLETUNER,
        NOT_NEEDED,
        "metadata_backend metadata_update_interval skip_file_discovery preserve_data_backend_cache crop_aspect_buckets "
        "text_embeds image_embeds default write_batch_size max_upscale_threshold hash_filenames vae_cache_ondemand",
    ),
    *ignored_keys(SIMPLETUNER, PAIRED_DATA, "conditioning_data conditioning"),
    *ignored_keys(SIMPLETUNER, NOT_NEEDED, "min_frames max_frames is_i2v bucket_strategy frame_interval", "video"),
    *ignored_keys(SIMPLETUNER, NOT_NEEDED, AUDIO_KEYS, "audio"),
    *ignored_keys(SIMPLETUNER, SEEDED_SHUFFLE, "count seed include_original", "caption_shuffle"),
    *ignored_keys(SIMPLETUNER, NOT_NEEDED, PARQUET_KEYS, "parquet"),
    *converted_keys(
        AI_TOOLKIT,
        {
            "folder_path": rename_to("instance_data_dir"),
            "dataset_path": rename_to("instance_data_dir"),
            "caption_ext": to_ours.caption_extension,
            "caption_dropout_rate": rename_to("captions.dropout"),
            "shuffle_tokens": rename_to("captions.shuffle_tags"),
            "keep_tokens": rename_to("captions.keep_tags"),
            "trigger_word": rename_to("captions.trigger_word"),
            "num_repeats": rename_to("repeats"),
            "control_path": unless_null("conditioning_dir"),
            "mask_path": unless_null("mask_dir"),
            "mask_min_value": to_ours.mask_floor,
            "prior_reg": rename_to("prior"),
            "num_frames": to_ours.frames,
            "flip_x": to_ours.switch_to("augment.flip", 0.5, 0.0),
            "random_crop": to_ours.switch_to("crop", "random", "center"),
            "bucket_tolerance": rename_to("bucket_step"),
            "cache_latents_to_disk": to_ours.cache_location("vae", "disk", memory_key="cache_latents"),
            "cache_latents": to_ours.cache_location("vae", "unified_memory"),
            "cache_text_embeddings": to_ours.cache_location("text", "unified_memory"),
        },
    ),
    DialectKey(AI_TOOLKIT, "resolution", to_ours.resolution_list, in_dialect_only=True),
    DialectKey(AI_TOOLKIT, "type", to_ours.folder_type, in_dialect_only=True),
    *ignored_keys(AI_TOOLKIT, NOT_NEEDED, AI_TOOLKIT_STAGING_KEYS),
    *ignored_keys(AI_TOOLKIT, NO_ALPHA_MASK, "alpha_mask"),
    *ignored_keys(AI_TOOLKIT, NO_STRENGTH, "network_weight"),
    *ignored_keys(AI_TOOLKIT, NO_REG, "is_reg"),
    *ignored_keys(AI_TOOLKIT, "has no effect: the model determines whether it starts from an image", "do_i2v"),
    *ignored_keys(AI_TOOLKIT, NO_FALLBACK_CAPTION, "default_caption"),
    *ignored_keys(AI_TOOLKIT, NO_TAG_CHANGES, "token_dropout_rate random_triggers poi"),
    *ignored_keys(AI_TOOLKIT, NO_SUCH_AUGMENTATION, "augments augmentations shuffle_augmentations flip_y random_scale"),
)
