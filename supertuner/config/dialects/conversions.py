"""How one foreign setting becomes settings of ours: small pure functions that the table of dialects names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from supertuner.config.sources.values import from_text, shown
from supertuner.core.types import JSON


@dataclass(frozen=True, slots=True)
class Put:
    """Set `to`, relative to the block the key stands in; `^` in front: from the root."""

    to: str
    value: JSON
    weak: bool = False
    """A consequence, not a wish: it gives way to the same setting given by name."""


@dataclass(frozen=True, slots=True)
class Said:
    """Accepted, and this is what it means here, or why it has no effect."""

    message: str


@dataclass(frozen=True, slots=True)
class No:
    """Cannot work here."""

    message: str


Outcome: TypeAlias = Put | Said | No
Convert: TypeAlias = Callable[[JSON, Mapping[str, JSON]], Sequence[Outcome]]
"""A value and the block it stands in → what becomes of it."""

PRECISIONS = {
    "no": "fp32",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_bf16": "adamw",
    "optimi-adamw": "adamw",
    "adam": "adamw",
    "adamw8bit": "adamw8bit",
    "ao-adamw8bit": "adamw8bit",
    "bnb-adamw8bit": "adamw8bit",
    "adafactor": "adafactor",
    "prodigy": "prodigy",
    "prodigyopt": "prodigy",
    "adamw_schedulefree": "schedule_free",
    "schedulefree": "schedule_free",
    "schedule_free": "schedule_free",
    "automagic": "automagic",
}
SCHEDULERS = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"}
CAPTIONS = {"textfile": "sidecar", "filename": "filename", "parquet": "metadata", "instanceprompt": "constant"}


def to(path: str) -> Convert:
    """The same value under our name."""
    return lambda value, block: [Put(path, value)]


def by_table(path: str, table: Mapping[str, str]) -> Convert:
    """A value with another name here; one that is not in the table passes unchanged, to be refused by its own name."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        return [Put(path, table.get(value.lower(), value) if isinstance(value, str) else value)]

    return convert


def positive_or_unset(path: str) -> Convert:
    """Zero, -1 and null mean "no limit" there; leaving the key out means it here."""
    return lambda value, block: [] if value in (0, -1, "0", "-1", None) else [Put(path, value)]


def unless_null(path: str) -> Convert:
    return lambda value, block: [] if value is None else [Put(path, value)]


def beside(block: Mapping[str, JSON], name: str) -> JSON:
    """The value of another key of the block; in SimpleTuner's files its name may have dashes, and the value quotes."""
    value = block.get(name, block.get(f"--{name}"))
    return from_text(value) if isinstance(value, str) else value


def cache_dir(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if not value:
        return [Said("names no folder, so it has no effect")]
    return [
        Put("^cache_config.cache_dir", value, weak=True),
        Put("^cache_config.persistent_cache", True, weak=True),
        Said("is read as cache_config.cache_dir with persistent_cache; one folder holds all caches of a run"),
    ]


def run_name(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    return [Put("^run.name", slug(value), weak=True)]


def mask_floor(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's `mask_min_value`, which is given whether or not there are masks."""
    return [] if beside(block, "mask_path") is None else [Put("mask_floor", value)]


def dataset_id(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    return [Put("id", slug(value))]


def slug(value: JSON) -> JSON:
    """A foreign name with only the characters that a name has here; what is no text is left for the check to refuse."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:200] or "unnamed"


def backend_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if value == "local":
        return [Put("type", "disk")]
    if value == "memory":
        return [Put("type", "in_memory")]
    if value in ("aws", "csv", "webshart", "huggingface"):
        return [
            No(f'{shown(value)} is not read here; fetch the files first and give their folder with type "in_memory"')
        ]
    return [Put("type", value)]


def folder_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit's kind of dataset; here files are looked at."""
    return [Said("has no effect: every folder is read alike")] if value in ("image", "sd") else [Put("type", value)]


def use_gh200_trainer(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if value is True:
        said = Said("there is one trainer here; this turns on gh200_optimizations.enable_uvm_hints")
        return [Put("^gh200_optimizations.enable_uvm_hints", True, weak=True), said]
    if value is False:
        return [Said("has no effect: there is one trainer here, and hints are set by gh200_optimizations")]
    return [No(f"{shown(value)} is not true or false")]


def ramp(name: str) -> Convert:
    """A number of the ramp at the top level asks for the ramp."""
    return lambda value, block: [
        Put(f"^gh200_optimizations.{name}", value),
        Put("^gh200_optimizations.enable_batch_size_rampup", True, weak=True),
    ]


def repeats(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner counts further repeats: its 0 is once, our 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return [Put("repeats", value + 1)]
    return [No(f"{shown(value)} is not a whole number of at least 0")]


def disabled(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """True is answered where the entry is read; here the rest."""
    return [] if isinstance(value, bool) else [No(f"{shown(value)} is not true or false")]


def crop(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if value is True:
        return [] if "crop_style" in block else [Put("crop", "center")]
    if value is False:
        return [Said("samples keep their shape up to the nearest bucket; the rest is cropped, by at most bucket_step")]
    return [Put("crop", value)]


def crop_style(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if value in ("corner", "face"):
        return [Put("crop", "center"), Said(f"{shown(value)} is not available; the centre is kept")]
    return [Put("crop", value)]


def crop_aspect(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if value == "square":
        return [Put("max_aspect_ratio", 1.0, weak=True)]
    if value in ("preserve", "closest"):
        return []
    return [No(f'{shown(value)} is not available; allowed: "square", "preserve", "closest"')]


def resolution(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """SimpleTuner's megapixels, or the side of a square of that area."""
    kind = block.get("resolution_type", block.get("--resolution_type", "pixel_area"))
    if kind == "area" and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        side = round(math.sqrt(value * 1e6) / 64) * 64  # SimpleTuner: 1.0 and 1.05 both mean 1024 × 1024
        return [Put("resolution", side), Said(f"{value} megapixels are a square of {side} pixels")]
    if kind == "pixel":
        return [
            Put("resolution", _whole(value)),
            Said("is the side of a square of the same area, not the shorter side"),
        ]
    return [Put("resolution", _whole(value))]


def resolution_type(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if value not in ("area", "pixel", "pixel_area"):
        return [No(f'{shown(value)} is not a resolution type; allowed: "area", "pixel", "pixel_area"')]
    known = "resolution" in block or "--resolution" in block
    return [] if known else [Said("has no effect without resolution beside it")]


def resolutions_each(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    """ai-toolkit uses every sample at every resolution of its list."""
    if isinstance(value, list) and len(value) > 1 and "resolution_mode" not in block:
        return [Put("resolution", value), Put("resolution_mode", "each", weak=True)]
    return [Put("resolution", value)]


def caption_strategy(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if not isinstance(value, str) or value not in CAPTIONS:
        return [No(f"{shown(value)} is not available; allowed: {', '.join(map(shown, CAPTIONS))}")]
    if block.get("only_instance_prompt") is True:
        return []
    puts: list[Outcome] = [Put("captions.source", CAPTIONS[value])]
    if value == "textfile":  # there, every line of the file is a caption of its own
        puts.append(Put("captions.several", block.get("disable_multiline_split") is not True, weak=True))
    return puts


def instance_prompt(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if not value:
        return []
    if block.get("only_instance_prompt") is True or block.get("caption_strategy") == "instanceprompt":
        return [Put("captions.constant", value), Put("captions.source", "constant", weak=True)]
    if block.get("prepend_instance_prompt") is True:
        return [Put("captions.trigger_word", value)]
    return [Said('has no effect here without caption_strategy "instanceprompt" or prepend_instance_prompt')]


def read_by(other: str, switch: bool = True) -> Convert:
    """A key, as a rule a switch, that another key's conversion reads."""

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        if switch and not isinstance(value, bool):
            return [No(f"{shown(value)} is not true or false")]
        return [] if other in block else [Said(f"has no effect without {other}")]

    return convert


def split_on(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    marks: dict[JSON, str] = {"comma": ",", "space": " ", "period": "."}
    if not isinstance(value, str) or value not in marks:
        return [No(f'{shown(value)} is not available; allowed: "comma", "space", "period"')]
    return [Put("captions.tag_separator", marks[value])]


def refresh_each_epoch(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    return [Put("augmentations_cache_mode", "refresh_each_epoch", weak=True)] if value is True else []


def extension(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    return [Put("captions.extension", f".{value.removeprefix('.')}" if isinstance(value, str) else value)]


def frames(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    many = isinstance(value, int) and value > 1
    return [Put("frames", value), *([Put("dataset_type", "video", weak=True)] if many else [])]


def mirror(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if not isinstance(value, bool):
        return [No(f"{shown(value)} is not true or false")]
    return [Put("augment.flip", 0.5 if value else 0.0)]


def random_crop(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
    if not isinstance(value, bool):
        return [No(f"{shown(value)} is not true or false")]
    return [Put("crop", "random" if value else "center")]


def cache_to(kind: str, where: str, unless: str = "") -> Convert:
    """A cache asked for by a dataset or the loop; here it is a setting of the run.

    `unless`: the key that asks for a copy in memory too, which then is what is read, while the disk keeps it.
    """

    def convert(value: JSON, block: Mapping[str, JSON]) -> Sequence[Outcome]:
        if not isinstance(value, bool):
            return [No(f"{shown(value)} is not true or false")]
        if not value:
            return []
        place = "unified_memory" if unless and block.get(unless) is True else where
        puts: list[Outcome] = [Put(f"^cache_config.{kind}_cache_type", place, weak=True)]
        if where == "disk":
            puts.append(Put("^cache_config.persistent_cache", True, weak=True))
        return [*puts, Said(f'is read as cache_config.{kind}_cache_type "{place}", for the whole run')]

    return convert


def _whole(value: JSON) -> JSON:
    return int(value) if isinstance(value, float) and value == int(value) else value
