"""Settings of one dataset, from its files to its samples in a batch, and of the loader that makes batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue
from supertuner.core.types import MediaKind


def _one_or_several(value: Any) -> Any:
    """`1024` means `[1024]`. A list becomes a tuple here because the strict reader of tuples wants one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


PixelSide = Annotated[int, Field(ge=16, le=16384)]
FrameCount = Annotated[int, Field(ge=1, le=100_000)]
PixelSides = Annotated[
    tuple[PixelSide, ...],
    Field(min_length=1, max_length=64),
    BeforeValidator(_one_or_several, json_schema_input_type=PixelSide | tuple[PixelSide, ...]),
]
FrameCounts = Annotated[
    tuple[FrameCount, ...],
    Field(min_length=1, max_length=64),
    BeforeValidator(_one_or_several, json_schema_input_type=FrameCount | tuple[FrameCount, ...]),
]
_ID = {"allowed": "text of letters, digits and . _ - that starts with a letter or digit"}
_ENDING = {"allowed": 'the ending of a file name, such as ".txt"'}
UnitFraction = Annotated[float, Field(ge=0, le=1)]


class InMemorySettings(SettingsBlock):
    compression: Literal["none", "auto", "lz4", "snappy", "zlib", "zstd"] | None = None
    """How files are stored in RAM: unset or "none": as they are; "auto": compressed where it saves at least 5 %."""
    memory_limit_gb: Annotated[float | None, Field(gt=0)] = None
    """Most that the staged dataset may take, in GB of 2^30 bytes; unset: what the machine has available."""
    num_workers: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Threads that stage; unset: the CPUs this process may use, at most 72."""


class CaptionSettings(SettingsBlock):
    source: Literal["auto", "sidecar", "metadata", "filename", "constant", "none"] = "auto"
    """Where captions come from; "auto": `constant`, else a metadata file, else files beside the samples, else none."""
    extension: Annotated[str, Field(pattern=r"^\.[A-Za-z0-9_.-]+$", json_schema_extra=_ENDING)] = ".txt"
    """Ending of caption files beside the samples."""
    metadata_file: Path | None = None
    """A .jsonl, .csv or .parquet file with one row per sample; unset: one named metadata.* in the dataset's folder."""
    file_column: Annotated[str, Field(min_length=1)] = "file_name"
    """Column of the metadata file that names the sample, relative to the dataset's folder."""
    caption_column: Annotated[str, Field(min_length=1)] = "text"
    """Column or field that holds the caption, or a list of captions."""
    constant: str | None = None
    """One caption for every sample; with source "auto" or "constant"."""
    several: bool = False
    """Each line of a caption file is a caption of its own, of which one is chosen for each use."""
    choose: Literal["random", "first"] = "random"
    """Which of several captions is used: a seeded choice for each epoch, or always the first."""
    trigger_word: str | None = None
    """Replaces `[trigger]` in a caption, or is put in front where the caption does not contain it."""
    dropout: UnitFraction = 0.0
    """Share of samples whose caption is empty, chosen anew each epoch."""
    shuffle_tags: bool = False
    """Shuffle the caption's tags anew each epoch."""
    keep_tags: Annotated[int, Field(ge=0)] = 0
    """So many of the first tags stay where they are when tags are shuffled."""
    tag_separator: Annotated[str, Field(min_length=1)] = ","
    """What separates tags."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.source == "constant" and self.constant is None:
            yield SettingsIssue("constant", 'source is "constant" and needs the caption here', ("source",))

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.keep_tags and not self.shuffle_tags:
            yield SettingsIssue("keep_tags", "has no effect while shuffle_tags is false")
        if self.constant is not None and self.source not in ("auto", "constant"):
            yield SettingsIssue("constant", f'has no effect with source "{self.source}"')
        if self.metadata_file is not None and self.source not in ("auto", "metadata"):
            yield SettingsIssue("metadata_file", f'has no effect with source "{self.source}"')


class AudioSettings(SettingsBlock):
    sample_rate: Annotated[int, Field(ge=1000, le=768_000)] = 44_100
    """Samples per second that sounds are resampled to."""
    channels: Annotated[int, Field(ge=1, le=64)] = 2
    """Channels that sounds are mixed to."""
    max_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Longer sounds are cut to this length."""
    step_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Lengths are cut down to a multiple of this, so that sounds share batches."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.step_seconds > self.max_seconds:
            yield SettingsIssue("step_seconds", f"{self.step_seconds:g} is above max_seconds {self.max_seconds:g}")


class AugmentSettings(SettingsBlock):
    flip: UnitFraction = 0.0
    """Probability that a sample is mirrored left to right."""
    crop_jitter: UnitFraction = 0.0
    """How far the crop may move from the centre: 0 not at all, 1 anywhere inside the image."""
    brightness: UnitFraction = 0.0
    """Brightness is multiplied by a number drawn from 1 - this to 1 + this."""
    contrast: UnitFraction = 0.0
    """Contrast is multiplied by a number drawn from 1 - this to 1 + this."""
    saturation: UnitFraction = 0.0
    """Saturation is multiplied by a number drawn from 1 - this to 1 + this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hue is turned by a number drawn from -this to this, in turns of the colour circle."""


class DatasetSettings(SettingsBlock):
    id: Annotated[str, Field(max_length=200, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$", json_schema_extra=_ID)] = ""
    """Unique name; unset: the name of the folder."""
    type: Literal["in_memory", "disk"] = "in_memory"
    """Staged into shared RAM, or into a mapped file on disk."""
    dataset_type: MediaKind = MediaKind.IMAGE
    """What the samples are."""
    instance_data_dir: Path | None = None
    """A folder of files, a WebDataset .tar or a folder of them, or a Hugging Face dataset saved on disk."""
    format: Literal["auto", "folder", "webdataset", "huggingface"] = "auto"
    """What `instance_data_dir` is; "auto" looks at it."""
    in_memory: InMemorySettings = InMemorySettings()
    """How staging stores the files, and how much memory it may take."""
    captions: CaptionSettings = CaptionSettings()
    """Where captions come from and what is done to them."""
    resolution: PixelSides = (1024,)
    """Side of the square whose area a sample is resized to, or several such sides."""
    resolution_mode: Literal["best", "each"] = "best"
    """With several resolutions: a sample is used at the best one, or once at each."""
    bucket_step: Annotated[int, Field(ge=1, le=1024)] = 64
    """Sides of samples are multiples of this."""
    max_aspect_ratio: Annotated[float, Field(ge=1, le=64)] = 2.0
    """Longest side over shortest; samples beyond it are cropped to it."""
    upscale: bool = True
    """Enlarge samples that are smaller than the resolution; otherwise they go to a bucket that they fill."""
    frames: FrameCounts = (1,)
    """Video: frames per sample, or several such numbers; a clip takes the largest that it can fill."""
    fps: Annotated[float | None, Field(gt=0, le=1000)] = None
    """Video: frames per second that clips are resampled to; unset: as in the file."""
    audio: AudioSettings = AudioSettings()
    """Audio: rate, channels and lengths."""
    resize_filter: Literal["lanczos", "bicubic", "bilinear", "area"] = "lanczos"
    """Filter for resizing."""
    crop: Literal["center", "random"] = "center"
    """Which part is kept where a sample does not fit its bucket; "random" moves the crop, seeded, each epoch."""
    augment: AugmentSettings = AugmentSettings()
    """Seeded changes to each sample, new ones each epoch."""
    conditioning_dir: Path | None = None
    """A folder of pictures named like the samples: what each of them was made from, for models that edit."""
    conditioning_resolution: PixelSide = 1024
    """Side of the square whose area pictures of `conditioning_dir` are resized to."""
    repeats: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How often each sample is seen in one epoch."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """How often this dataset is drawn from, relative to the others."""
    loss_weight: Annotated[float, Field(ge=0, le=1_000_000)] = 1.0
    """What the loss of its samples counts."""
    loss_weights_file: Path | None = None
    """A .jsonl, .csv or .parquet file with the columns `captions.file_column` and `weight`: what the loss of single
    samples counts, times `loss_weight`; samples that are not in it count 1."""
    mask_dir: Path | None = None
    """A folder of pictures named like the samples: a sample is learnt from where its mask is white, and not where it is
    black."""
    mask_floor: UnitFraction = 0.0
    """What black places of a mask count; white ones count 1."""
    prior: bool = False
    """Prior preservation: its samples keep what the model knew, as their target is what it predicts untrained."""
    limit: Annotated[int | None, Field(ge=1)] = None
    """Use only so many samples; for a first try."""
    strict: bool = False
    """Stop at the first broken file instead of setting it aside."""
    max_broken_share: UnitFraction = 0.05
    """Stop when more than this share of the files is broken."""
    check: Literal["structure", "decode"] = "structure"
    """How staging checks files: by their headers and structure, or by decoding each one."""
    held_out: bool = False
    """Not trained on: the loss on its samples is measured at every validation."""
    augmentations_cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] | None = None
    """What the cache of a dataset whose samples change from turn to turn does: nothing of it is cached; `variations` of
    each sample are kept and used in turn; or each epoch gets its own, made while the one before is trained on. Unset:
    "static"."""
    variations: Annotated[int, Field(ge=1, le=1000)] = 1
    """static: so many different changes of each sample are cached."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        small = [side for side in self.resolution if side < self.bucket_step]
        if small:
            yield SettingsIssue("resolution", f"{small[0]} is below bucket_step {self.bucket_step}", ("bucket_step",))
        if self.dataset_type is not MediaKind.VIDEO and self.frames != (1,):
            yield SettingsIssue(
                "frames",
                f'{_numbers_text(self.frames)} needs dataset_type "video", not "{self.dataset_type}"',
                ("dataset_type",),
            )
        for name, field in (("frames", self.frames), ("resolution", self.resolution)):
            if len(set(field)) != len(field):
                yield SettingsIssue(name, f"{_numbers_text(field)} names one value twice")
        if self.dataset_type is MediaKind.AUDIO:
            for key in ("flip", "crop_jitter", "brightness", "contrast", "saturation", "hue"):
                if getattr(self.augment, key):
                    yield SettingsIssue(f"augment.{key}", "has no meaning for sound; remove it", ("dataset_type",))
            if self.mask_dir is not None:
                yield SettingsIssue("mask_dir", "has no meaning for sound; remove it", ("dataset_type",))
        if self.conditioning_dir is not None:
            yield from self._conditioning_contradictions()

    def _conditioning_contradictions(self) -> Iterator[SettingsIssue]:
        """A sample and what it was made from are shown as they are, and once."""
        if self.dataset_type is not MediaKind.IMAGE:
            yield SettingsIssue(
                "conditioning_dir", f'needs dataset_type "image", not "{self.dataset_type}"', ("dataset_type",)
            )
        changed = [f"augment.{name}" for name, value in self.augment if value]
        for name in (*changed, *(["crop"] if self.crop == "random" else [])):
            yield SettingsIssue(
                name, "would change a sample and not what it was made from; remove it", ("conditioning_dir",)
            )
        if self.resolution_mode == "each" and len(self.resolution) > 1:
            yield SettingsIssue(
                "resolution_mode", 'is not available with conditioning_dir; use "best"', ("conditioning_dir",)
            )

    def warnings(self) -> Iterator[SettingsIssue]:
        if "conditioning_resolution" in self.model_fields_set and self.conditioning_dir is None:
            yield SettingsIssue("conditioning_resolution", "has an effect only with conditioning_dir")
        uneven = [side for side in self.resolution if side % self.bucket_step]
        if uneven and self.dataset_type is not MediaKind.AUDIO:
            message = (
                f"{uneven[0]} is not a multiple of bucket_step {self.bucket_step}; buckets come as close as they can"
            )
            yield SettingsIssue("resolution", message)
        odd = [count for count in self.frames if count % 4 != 1]
        if self.dataset_type is MediaKind.VIDEO and odd:
            yield SettingsIssue(
                "frames", f"{odd[0]} is not 4n + 1, which the encoders of video models want; they cut the rest"
            )
        if "mask_floor" in self.model_fields_set and self.mask_dir is None:
            yield SettingsIssue("mask_floor", "has no effect without mask_dir")
        if self.prior and self.held_out:
            yield SettingsIssue("prior", "has no effect: the dataset is held out")
        if self.fps is not None and self.dataset_type is not MediaKind.VIDEO:
            yield SettingsIssue("fps", f'has no effect with dataset_type "{self.dataset_type}"')
        varies = self.crop == "random" or self.captions.shuffle_tags or any(value for _, value in self.augment)
        if self.variations > 1 and not varies:
            message = (
                f'{self.variations} variations are all the same: set augment, captions.shuffle_tags, or crop: "random"'
            )
            yield SettingsIssue("variations", message)


class LoaderSettings(SettingsBlock):
    prefetch_batches: Annotated[int | None, Field(ge=0, le=1024)] = None
    """Batches made ahead of the one in use, beside it; unset: 2, and none where the model computes on the CPU and all
    samples are cached: making them beside it would only slow it down."""
    num_workers: Annotated[int | None, Field(ge=1, le=1024)] = None
    """Threads that decode; unset: the CPUs this process may use."""
    drop_last: bool = False
    """Leave out a bucket's last batch of an epoch when it is not full."""

    @property
    def batches_ahead(self) -> int:
        """Batches made ahead where something else computes meanwhile."""
        return 2 if self.prefetch_batches is None else self.prefetch_batches


def _numbers_text(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else str(list(numbers))
