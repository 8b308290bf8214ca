"""Conversions of dialect keys to our settings: small pure functions, used by the tables of keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from supertuner.config.settings.values import format_value, parse_text
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class SettingValue:
    """Sets `target`, a path relative to the dataset; relative to the root outside datasets, or if it starts with
    `^`."""

    target: str
    value: JSON
    is_implied: bool = False
    """It follows from another key, and is overridden if the setting itself is given."""


@dataclass(frozen=True, slots=True)
class ConversionNote:
    """The key is accepted; the message explains what it means here, or why it has no effect."""

    message: str


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """The value is refused; the message gives the reason."""

    message: str


ConversionOutcome: TypeAlias = SettingValue | ConversionNote | InvalidValue
Outcomes: TypeAlias = Sequence[ConversionOutcome]
KeyConversion: TypeAlias = Callable[[JSON, Mapping[str, JSON]], Outcomes]
"""(value, block that contains the key) → outcomes."""

PRECISIONS = {
    **dict.fromkeys(("no", "fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}
CAPTION_SOURCES = {
    "textfile": "sidecar",
    "filename": "filename",
    **dict.fromkeys(("parquet", "csv", "jsonl", "huggingface", "webshart"), "metadata"),
    "instanceprompt": "constant",
}


def not_available(value: JSON, allowed: Iterable[str]) -> InvalidValue:
    return InvalidValue(f"{format_value(value)} is not available; allowed: {', '.join(map(format_value, allowed))}")


def not_a_switch(value: JSON) -> InvalidValue:
    return InvalidValue(f"{format_value(value)} is not true or false")


def rename_to(path: str) -> KeyConversion:
    """The same value under our name `path`."""
    return lambda value, block: [SettingValue(path, value)]


def map_value(path: str, names: Mapping[str, str]) -> KeyConversion:
    """Translate the value by a table. A value that is not in the table is passed on, so that the error shows it."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        return [SettingValue(path, names.get(value.lower(), value) if isinstance(value, str) else value)]

    return convert


def positive_or_unset(path: str) -> KeyConversion:
    """0, -1 and null mean "no limit" in the dialect; here an unset setting does."""
    return lambda value, block: [] if value in (0, -1, "0", "-1", None) else [SettingValue(path, value)]


def unless_null(path: str) -> KeyConversion:
    return lambda value, block: [] if value is None else [SettingValue(path, value)]


def sibling_value(block: Mapping[str, JSON], name: str) -> JSON:
    """The value of another key of the block. In SimpleTuner's files, the key may start with `--`, and a number may be
    quoted."""
    value = block.get(name, block.get(f"--{name}"))
    return parse_text(value) if isinstance(value, str) else value


def cache_dir(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """A folder of caches. Placeholders in braces, such as `{model_family}`, are left out of its name."""
    if not value:
        return []
    if isinstance(value, str):
        value = re.sub(r"/*\{[^{}/]*\}", "", value).rstrip("/") or "cache"
    return [
        SettingValue("^cache_config.cache_dir", value, is_implied=True),
        SettingValue("^cache_config.persistent_cache", True, is_implied=True),
    ]


def run_name(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    return [SettingValue("^run.name", slug(value), is_implied=True)]


def mask_floor(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `mask_min_value`; it counts only if `mask_path` is set."""
    return [] if sibling_value(block, "mask_path") is None else [SettingValue("mask_floor", value)]


def dataset_id(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    return [SettingValue("id", slug(value))]


def slug(value: JSON) -> JSON:
    """A name with only the characters that names may have here. A value that is not text is returned unchanged, and
    validation refuses it."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:200] or "unnamed"


def backend_type(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if value in ("local", "huggingface"):
        return [SettingValue("type", "disk")]
    if value == "memory":
        return [SettingValue("type", "in_memory")]
    if value in ("aws", "csv", "webshart"):
        return [InvalidValue(f"{format_value(value)} is not supported; download the files and set instance_data_dir")]
    return [SettingValue("type", value)]


def hub_dataset(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `dataset_name`: a dataset on the Hugging Face hub, or a folder."""
    if not value:
        return []
    huggingface = block.get("huggingface")
    nested = huggingface.get("revision") if isinstance(huggingface, Mapping) else None
    revision = block.get("revision") or nested
    text = str(value)
    is_folder = text.startswith(("/", "./", "../", "~")) or text.count("/") != 1
    return [SettingValue("instance_data_dir", text if is_folder else f"{HUB_PREFIX}{text}@{revision or 'main'}")]


def dataset_kind(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `dataset_type`, of which `eval` stands for held-out samples."""
    return [SettingValue("held_out", True)] if value == "eval" else [SettingValue("dataset_type", value)]


def first_folder(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `control_path` and its numbered forms: folders of reference images, of which one is used."""
    folders = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    folders = [folder for folder in folders if folder]
    if not folders:
        return []
    notes = [ConversionNote("a sample has one reference image; the first folder is used")] if len(folders) > 1 else []
    return [SettingValue("conditioning_dir", folders[0], is_implied=True), *notes]


def shrink_video(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `shrink_video_to_frames`; only videos have an answer."""
    if not isinstance(value, bool):
        return [not_a_switch(value)]
    if not value or not _is_video(block):
        return []
    note = "clips keep their speed, and num_frames of them are used; set fps to resample them"
    return [ConversionNote(f"has no effect: {note}")]


def _is_video(block: Mapping[str, JSON]) -> bool:
    frames = block.get("num_frames", 1)
    return isinstance(frames, int) and frames > 1


def square_crop(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    return [SettingValue("max_aspect_ratio", 1.0)] if value is True else []


def invert_mask(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `invert_mask`, which would train on the opposite of what the masks show here."""
    if value in (False, None) or sibling_value(block, "mask_path") is None:
        return []
    return [InvalidValue("masks are not inverted here; invert the files of mask_path, white where the loss counts")]


def folder_type(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `type` of a dataset. Here the files themselves determine it."""
    if value in ("image", "sd"):
        return [ConversionNote("has no effect: all folders are read in the same way")]
    return [SettingValue("type", value)]


def use_gh200_trainer(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if value is True:
        note = ConversionNote("turns on gh200_optimizations.enable_uvm_hints; there is only one trainer")
        return [SettingValue("^gh200_optimizations.enable_uvm_hints", True, is_implied=True), note]
    if value is False:
        remedy = "gh200_optimizations.enable_uvm_hints turns hints off"
        return [ConversionNote(f"has no effect: there is only one trainer; {remedy}")]
    return [not_a_switch(value)]


def ramp_setting(name: str) -> KeyConversion:
    """A setting of the ramp at the top level of the file, which also turns the ramp on."""
    return lambda value, block: [
        SettingValue(f"^gh200_optimizations.{name}", value),
        SettingValue("^gh200_optimizations.enable_batch_size_rampup", True, is_implied=True),
    ]


def repeats(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner counts additional repeats: its 0 is our 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return [SettingValue("repeats", value + 1)]
    return [InvalidValue(f"{format_value(value)} is not a whole number of at least 0")]


def disabled(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """`translate` handles true; here other values are refused."""
    return [] if isinstance(value, bool) else [not_a_switch(value)]


def crop(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if value is True:
        return [] if "crop_style" in block else [SettingValue("crop", "center")]
    if value is False:
        return [
            ConversionNote(
                "has no effect: SuperTuner resizes samples to the nearest bucket and crops less than bucket_step"
            )
        ]
    return [SettingValue("crop", value)]


def crop_style(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if block.get("crop") is False:
        return []  # it does not count, in SimpleTuner as well
    if value in ("corner", "face"):
        note = ConversionNote(f"{format_value(value)} is not available; samples are cropped to the centre")
        return [SettingValue("crop", "center"), note]
    return [SettingValue("crop", value)]


def crop_aspect(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if value == "square":
        # SimpleTuner crops only if `crop` is true, which is its default
        return [SettingValue("max_aspect_ratio", 1.0, is_implied=True)] if block.get("crop") is not False else []
    if value in ("preserve", "closest", "random"):
        return []
    return [not_available(value, ("square", "preserve", "closest", "random"))]


def resolution(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `resolution`: megapixels, or the side of a square, by `resolution_type`."""
    kind = block.get("resolution_type", block.get("--resolution_type", "pixel_area"))
    if kind == "area" and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        side = round(math.sqrt(value * 1e6) / 64) * 64  # SimpleTuner: 1.0 and 1.05 both mean 1024 × 1024
        note = ConversionNote(f"{value} megapixels is the area of a square of {side} × {side} pixels")
        return [SettingValue("resolution", side), note]
    setting = SettingValue("resolution", int(value) if isinstance(value, float) and value == int(value) else value)
    if kind == "pixel":
        note = ConversionNote("is read as the side of a square of the same area, not as the shorter side")
        return [setting, note]
    return [setting]


def resolution_type(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if value not in ("area", "pixel", "pixel_area"):
        return [InvalidValue(f'{format_value(value)} is not a resolution type; allowed: "area", "pixel", "pixel_area"')]
    has_resolution = "resolution" in block or "--resolution" in block
    return [] if has_resolution else [ConversionNote("has no effect without resolution")]


def resolution_list(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit uses every sample at every resolution of the list."""
    setting = SettingValue("resolution", value)
    if not isinstance(value, list) or len(value) < 2 or "resolution_mode" in block:
        return [setting]
    if any(block.get(name) for name in ("control_path", "control_path_1", "control_path_2", "control_path_3")):
        return [
            setting,
            ConversionNote("with reference images, a sample is used at the best of these resolutions only"),
        ]
    return [setting, SettingValue("resolution_mode", "each", is_implied=True)]


def caption_strategy(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if not isinstance(value, str) or value not in CAPTION_SOURCES:
        return [not_available(value, CAPTION_SOURCES)]
    if block.get("only_instance_prompt") is True:
        return []
    source = SettingValue("captions.source", CAPTION_SOURCES[value])
    if value != "textfile":
        return [source]
    several = block.get("disable_multiline_split") is not True  # each line of the file is a separate caption
    return [source, SettingValue("captions.several", several, is_implied=True)]


def instance_prompt(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if not value:
        return []
    if block.get("only_instance_prompt") is True or block.get("caption_strategy") == "instanceprompt":
        return [SettingValue("captions.constant", value), SettingValue("captions.source", "constant", is_implied=True)]
    if block.get("prepend_instance_prompt") is True:
        return [SettingValue("captions.trigger_word", value)]
    return [ConversionNote('has no effect without caption_strategy "instanceprompt" or prepend_instance_prompt')]


def used_by_key(other_key: str, is_switch: bool = True) -> KeyConversion:
    """A key that only the conversion of `other_key` reads. `is_switch`: it must be true or false."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if is_switch and not isinstance(value, bool):
            return [not_a_switch(value)]
        is_there = other_key in block or f"--{other_key}" in block
        return [] if is_there else [ConversionNote(f"has no effect without {other_key}")]

    return convert


def split_on(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    separators = {"comma": ",", "space": " ", "period": "."}
    if not isinstance(value, str) or value not in separators:
        return [not_available(value, separators)]
    return [SettingValue("captions.tag_separator", separators[value])]


def refresh_each_epoch(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    return [SettingValue("augmentations_cache_mode", "refresh_each_epoch", is_implied=True)] if value is True else []


def caption_extension(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    return [SettingValue("captions.extension", f".{value.removeprefix('.')}" if isinstance(value, str) else value)]


HUB_PREFIX = "hub:"
"""The beginning of an `instance_data_dir` that names a dataset on the Hugging Face hub, `hub:owner/name@revision`."""


def frames(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    setting = SettingValue("frames", value)
    is_video = isinstance(value, int) and value > 1
    return [setting, SettingValue("dataset_type", "video", is_implied=True)] if is_video else [setting]


def switch_to(path: str, on: JSON, off: JSON, is_implied: bool = False) -> KeyConversion:
    """A switch that sets `path` to one of two values."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if not isinstance(value, bool):
            return [not_a_switch(value)]
        return [SettingValue(path, on if value else off, is_implied)]

    return convert


def set_if_true(path: str, value: JSON) -> KeyConversion:
    """A switch: true sets `path` to `value`, false sets nothing."""

    def convert(switch: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if not isinstance(switch, bool):
            return [not_a_switch(switch)]
        return [SettingValue(path, value)] if switch else []

    return convert


def cache_location(kind: str, location: str, memory_key: str = "") -> KeyConversion:
    """A switch of a dataset or of the training loop that asks for a cache; here caches are settings of the run.

    `kind` is "vae" or "text", `location` the cache type. If the switch `memory_key` is also true, samples are read from
    unified memory and the disk keeps them.
    """

    def convert(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
        if not isinstance(value, bool):
            return [not_a_switch(value)]
        if not value:
            return []
        cache_type = "unified_memory" if memory_key and block.get(memory_key) is True else location
        settings: dict[str, JSON] = {f"{kind}_cache_type": cache_type}
        if location == "disk":
            settings["persistent_cache"] = True
        return [SettingValue(f"^cache_config.{name}", value, True) for name, value in settings.items()]

    return convert
