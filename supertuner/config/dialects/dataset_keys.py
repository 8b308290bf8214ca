"""The keys of datasets in SimpleTuner and ai-toolkit, and their conversions."""

from __future__ import annotations

from supertuner.config.dialects import conversions as to_ours
from supertuner.config.dialects.conversions import rename_to, unless_null
from supertuner.config.dialects.dialect_keys import (
    AI_TOOLKIT,
    OFF_VALUES,
    SIMPLETUNER,
    DialectKey,
    approximated_keys,
    converted_keys,
    ignored_keys,
    sometimes_ignored_keys,
)

NOT_NEEDED = "has no effect: staging does this automatically"
PAIRED_DATA = (
    "has no effect: set conditioning_dir to a folder of reference images, or mask_dir to a folder of masks; "
    "their files are named like the samples"
)
NO_REG = "has no effect: set prior: true for prior preservation, or loss_weight to weight the dataset"
NO_SIZES = (
    "has no effect: samples of all sizes are used, resized to the resolution; set upscale: false to keep small ones "
    "from being enlarged"
)
NEVER_DELETED = "has no effect: files are never deleted; broken ones are set aside, and the run says which"
NO_NSFW_CHECK = "has no effect: samples are not classified"
NO_UPSCALE_LIMIT = "has no effect: set upscale: false to keep small samples from being enlarged"
ALWAYS_ENCODED = "has no effect: samples are encoded before training, unless cache_config turns the cache off"
ALL_EPOCHS = "has no effect: a dataset is used from the first step to the last; weight and repeats set how often"
NOT_THERE = "has no effect: datasets are folders and archives on this machine; download the files first"
NO_SPLIT_IMAGES = "has no effect: an image is one sample; split composite images into files of their own"
ONE_BATCH_SIZE = "has no effect: train.batch_size counts for all datasets"
MODEL_STARTS_FROM_IMAGE = "has no effect: the model determines whether it starts from an image"
NO_GROUNDING = "has no effect: bounding boxes are not used"
NO_SLIDER = "has no effect: an adapter is trained at full strength; there is no slider training"
NO_ADAPTERS_FOR_IMAGES = "has no effect: there are no image-prompt adapters"
NO_ASPECT_RATIOS = "has no effect: samples of every aspect ratio are used, cropped to max_aspect_ratio"
NO_ALPHA_MASK = (
    "has no effect: alpha channels are not read as masks; set mask_dir to a folder of masks named like the samples"
)
NO_STRENGTH = "has no effect: an adapter is trained at full strength on every dataset; loss_weight weights a dataset"
SEEDED_SHUFFLE = "has no effect: tags are shuffled in each epoch, seeded by run.seed"
NO_FALLBACK_CAPTION = "has no effect: captions.constant gives all samples one caption; there is none for some samples"
NO_TAG_CHANGES = "has no effect: captions has dropout (of whole captions), trigger_word and shuffle_tags"
NO_SUCH_AUGMENTATION = "has no effect: the augment block lists the available augmentations"
_SAME_NAME = ("resolution", "resolution_type", "caption_strategy", "instance_prompt", "prepend_instance_prompt")
INHERITED_ROOT_KEYS = {
    SIMPLETUNER: {
        **{name: name for name in (*_SAME_NAME, "only_instance_prompt", "disable_multiline_split")},
        "caption_dropout_probability": "captions.dropout",
        "aspect_bucket_alignment": "bucket_step",
        "parquet_caption_column": "parquet.caption_column",
        "parquet_filename_column": "parquet.filename_column",
    },
    AI_TOOLKIT: {"trigger_word": "captions.trigger_word"},
}
"""Keys of the root that apply to every dataset without that key, and their names in the dataset."""

SIMPLETUNER_DATASET_KEYS = (
    *converted_keys(
        SIMPLETUNER,
        {
            "type": to_ours.backend_type,
            "disabled": to_ours.disabled,
            "disable": to_ours.disabled,
            "dataset_name": to_ours.hub_dataset,
            "huggingface.dataset_name": to_ours.hub_dataset,
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
            "caption_column": unless_null("captions.caption_column"),
            "csv_caption_column": unless_null("captions.caption_column"),
            "huggingface.caption_column": unless_null("captions.caption_column"),
            "parquet.path": rename_to("captions.metadata_file"),
            "parquet.filename_column": unless_null("captions.file_column"),
            "parquet.caption_column": unless_null("captions.caption_column"),
            "vae_cache_clear_each_epoch": to_ours.refresh_each_epoch,
            "vae_cache_disable": to_ours.set_if_true("^cache_config.vae_cache_type", "none"),
            "text_cache_disable": to_ours.set_if_true("^cache_config.text_cache_type", "none"),
            "probability": rename_to("weight"),
            "max_num_samples": unless_null("limit"),
            "is_regularisation_data": rename_to("prior"),
            "is_regularization_data": rename_to("prior"),
            "video.num_frames": to_ours.frames,
            "audio.max_duration_seconds": unless_null("audio.max_seconds"),
            "audio.duration_interval": rename_to("audio.step_seconds"),
        },
    ),
    *approximated_keys(
        SIMPLETUNER,
        "one folder holds all caches of a run: cache_config.cache_dir, with persistent_cache",
        {"cache_dir_vae": to_ours.cache_dir, "cache_dir": to_ours.cache_dir},
    ),
    DialectKey(SIMPLETUNER, "id", to_ours.dataset_id, in_dialect_only=True),
    DialectKey(SIMPLETUNER, "repeats", to_ours.repeats, in_dialect_only=True),
    DialectKey(SIMPLETUNER, "resolution", to_ours.resolution, in_dialect_only=True),
    DialectKey(SIMPLETUNER, "dataset_type", to_ours.dataset_kind, in_dialect_only=True),
    *ignored_keys(SIMPLETUNER, NO_SIZES, "minimum_image_size maximum_image_size target_downsample_size"),
    *ignored_keys(SIMPLETUNER, NO_UPSCALE_LIMIT, "max_upscale_threshold"),
    *ignored_keys(SIMPLETUNER, NO_ASPECT_RATIOS, "minimum_aspect_ratio crop_aspect_buckets"),
    *ignored_keys(
        SIMPLETUNER,
        NOT_NEEDED,
        "metadata_backend metadata_update_interval skip_file_discovery preserve_data_backend_cache text_embeds "
        "image_embeds conditioning_image_embeds default write_batch_size read_batch_size vae_batch_size max_workers "
        "text_encoder_batch_size conditioning_image_embed_batch_size hash_filenames shorten_filenames "
        "csv_hash_filenames csv_shorten_filenames compress_cache cache_file_suffix vae_cache_scan_behaviour "
        "cache_dir_conditioning_image_embeds csv_cache_dir scan_for_errors num_proc shuffle config_version",
        off=(*OFF_VALUES, True, "discovery", "huggingface", "parquet"),
    ),
    *ignored_keys(SIMPLETUNER, ALWAYS_ENCODED, "vae_cache_ondemand text_cache_ondemand"),
    *ignored_keys(SIMPLETUNER, PAIRED_DATA, "conditioning_data conditioning conditioning_type source_dataset_id"),
    *ignored_keys(SIMPLETUNER, NEVER_DELETED, "delete_problematic_images delete_unwanted_images delete_nsfw_images"),
    *ignored_keys(
        SIMPLETUNER,
        ALL_EPOCHS,
        "start_epoch start_step end_epoch end_step ignore_epochs disable_after_epoch_step",
        off=(*OFF_VALUES, 1),
    ),
    *ignored_keys(SIMPLETUNER, ONE_BATCH_SIZE, "train_batch_size"),
    *ignored_keys(
        SIMPLETUNER, "has no effect: all datasets share one distribution of noise", "timestep_sampling_offset"
    ),
    *ignored_keys(SIMPLETUNER, NO_TAG_CHANGES, "caption_filter_list"),
    *ignored_keys(
        SIMPLETUNER, "has no effect: captions.extension is the extension of captions", "caption_file_extensions"
    ),
    *ignored_keys(SIMPLETUNER, "has no effect: held-out samples are those with held_out: true", "disable_validation"),
    *ignored_keys(SIMPLETUNER, NO_SLIDER, "slider_strength", off=(*OFF_VALUES, 1.0)),
    *ignored_keys(SIMPLETUNER, NO_GROUNDING, "grounding grounding_data"),
    *ignored_keys(SIMPLETUNER, NO_SPLIT_IMAGES, "split_composite_images composite_image_column"),
    *ignored_keys(SIMPLETUNER, "has no effect: nothing is distilled here", "distillation_type"),
    *ignored_keys(
        SIMPLETUNER,
        NOT_THERE,
        "aws aws_access_key_id aws_bucket_name aws_data_prefix aws_endpoint_url aws_max_pool_connections "
        "aws_region_name aws_secret_access_key aws_session_token csv_file csv_url_column webshart source metadata "
        "subfolder buffer_size max_file_size parallel_downloads shard_cache_gb webshart_optimise_captions "
        "webshart_optimize_captions streaming hf_token auth_token auto_load",
    ),
    *ignored_keys(
        SIMPLETUNER,
        'has no effect: type: "in_memory" puts the files into shared memory without a mount',
        "memory_filesystem_path memory_filesystem_size memory_filesystem_sudo",
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: the media column is the one of the dataset's type, and the split is train",
        "image_column video_column audio_column split dataset_config revision",
        off=(*OFF_VALUES, "image", "video", "audio", "train"),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: the media column is the one of the dataset's type, and the split is train",
        "image_column video_column audio_column split revision cache_dir auto_load num_proc streaming "
        "composite_image_config filter_func",
        "huggingface",
        off=(*OFF_VALUES, "image", "video", "audio", "train", True),
    ),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: frames lists numbers of frames, of which a clip uses the largest that it can fill",
        "min_frames max_frames bucket_strategy frame_interval",
        "video",
    ),
    *ignored_keys(SIMPLETUNER, MODEL_STARTS_FROM_IMAGE, "is_i2v", "video"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: sounds are cut to a multiple of audio.step_seconds, from their beginning",
        "bucket_strategy truncation_mode auto_split allow_zero_audio source_from_video audio_only "
        "lyrics_filename_format min_duration_seconds target_resolution",
        "audio",
        off=(*OFF_VALUES, "duration", "beginning"),
    ),
    *ignored_keys(SIMPLETUNER, SEEDED_SHUFFLE, "count seed include_original", "caption_shuffle"),
    *ignored_keys(
        SIMPLETUNER,
        "has no effect: sizes are read from the files, and captions.file_column has names with their extension",
        "width_column height_column identifier_includes_extension",
        "parquet",
    ),
    *ignored_keys(SIMPLETUNER, NO_FALLBACK_CAPTION, "fallback_caption_column", "parquet"),
)

AI_TOOLKIT_DATASET_KEYS = (
    *converted_keys(
        AI_TOOLKIT,
        {
            "folder_path": unless_null("instance_data_dir"),
            "dataset_path": unless_null("instance_data_dir"),
            "caption_ext": to_ours.caption_extension,
            "caption_type": to_ours.caption_extension,
            "caption_dropout_rate": rename_to("captions.dropout"),
            "shuffle_tokens": rename_to("captions.shuffle_tags"),
            "keep_tokens": rename_to("captions.keep_tags"),
            "trigger_word": unless_null("captions.trigger_word"),
            "num_repeats": rename_to("repeats"),
            **dict.fromkeys(
                ("control_path", "control_path_1", "control_path_2", "control_path_3"), to_ours.first_folder
            ),
            "mask_path": unless_null("mask_dir"),
            "mask_min_value": to_ours.mask_floor,
            "prior_reg": rename_to("prior"),
            "loss_multiplier": rename_to("loss_weight"),
            "num_frames": to_ours.frames,
            "flip_x": to_ours.switch_to("augment.flip", 0.5, 0.0),
            "random_crop": to_ours.switch_to("crop", "random", "center"),
            "bucket_tolerance": rename_to("bucket_step"),
        },
    ),
    *approximated_keys(
        AI_TOOLKIT,
        "is a setting of the whole run: cache_config",
        {
            "cache_latents_to_disk": to_ours.cache_location("vae", "disk", memory_key="cache_latents"),
            "cache_latents": to_ours.cache_location("vae", "unified_memory"),
            "cache_text_embeddings": to_ours.cache_location("text", "unified_memory"),
        },
    ),
    *approximated_keys(
        AI_TOOLKIT,
        "crops to the bucket of a square, not to the middle of the image",
        {"square_crop": to_ours.square_crop},
    ),
    DialectKey(AI_TOOLKIT, "resolution", to_ours.resolution_list, in_dialect_only=True),
    DialectKey(AI_TOOLKIT, "type", to_ours.folder_type, in_dialect_only=True),
    *ignored_keys(
        AI_TOOLKIT,
        NOT_NEEDED,
        "num_workers prefetch_factor augmentation_cache_epoch scale cache_latents_num_workers cache_tensors_to_disk "
        "cache_clip_vision_to_disk load_image_when_caching_latents fast_image_size debug auto_frame_count "
        "trim_auto_frame_count_tail",
        off=(*OFF_VALUES, 1.0, 2, True),
    ),
    *ignored_keys(AI_TOOLKIT, "has no effect: samples are always sorted into buckets", "buckets", off=(None, True)),
    *ignored_keys(AI_TOOLKIT, ONE_BATCH_SIZE, "batch_size"),
    *sometimes_ignored_keys(
        AI_TOOLKIT,
        "clips keep their speed, and masks their meaning",
        {"shrink_video_to_frames": to_ours.shrink_video, "invert_mask": to_ours.invert_mask},
    ),
    *ignored_keys(AI_TOOLKIT, NO_STRENGTH, "network_weight", off=(None, 1)),
    *ignored_keys(AI_TOOLKIT, NO_ALPHA_MASK, "alpha_mask"),
    *ignored_keys(AI_TOOLKIT, NO_REG, "is_reg"),
    *ignored_keys(AI_TOOLKIT, MODEL_STARTS_FROM_IMAGE, "do_i2v"),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: the sound of a video is not trained",
        "do_audio audio_normalize audio_preserve_pitch",
    ),
    *ignored_keys(AI_TOOLKIT, NO_FALLBACK_CAPTION, "default_caption"),
    *ignored_keys(
        AI_TOOLKIT,
        NO_TAG_CHANGES,
        "token_dropout_rate random_triggers random_triggers_max poi use_short_captions replacements",
        off=(*OFF_VALUES, 1),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        NO_SUCH_AUGMENTATION,
        "augments augmentations shuffle_augmentations flip_y random_scale standardize_images extra_values",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: reference images come from conditioning_dir, as files named like the samples",
        "controls control_from_same_folder num_controls_from_same_folder control_transparent_color inpaint_path "
        "unconditional_path guidance_type",
        off=(*OFF_VALUES, 1, [0, 0, 0], "targeted"),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: conditioning_resolution is the size of reference images",
        "full_size_control_images replay_transforms",
        off=(None, True),
    ),
    *ignored_keys(
        AI_TOOLKIT,
        NO_ADAPTERS_FOR_IMAGES,
        "clip_image_path clip_image_from_same_folder clip_image_augmentations clip_image_shuffle_augmentations",
    ),
    *ignored_keys(
        AI_TOOLKIT,
        "has no effect: use a dataset with prior: true to keep what the model knows",
        "diff_output_preservation diff_output_preservation_class",
    ),
)

DATASET_KEYS = SIMPLETUNER_DATASET_KEYS + AI_TOOLKIT_DATASET_KEYS
