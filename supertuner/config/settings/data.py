"""Settings of a dataset, from its files to its samples in a batch, and of the data loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from supertuner.config.settings.block import SettingsBlock, SettingsIssue
from supertuner.core.types import MediaKind


def one_or_several(item: Any, *types: type) -> BeforeValidator:
    """Accept a single value of `types` for a list: `1024` → `(1024,)`. A list becomes a tuple, which strict pydantic
    needs. `item` is the type of the items."""

    def to_tuple(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return (value,) if isinstance(value, types) and not isinstance(value, bool) else value

    return BeforeValidator(to_tuple, json_schema_input_type=item | tuple[item, ...])


SEVERAL = Field(min_length=1, max_length=64)
PixelSide = Annotated[int, Field(ge=16, le=16384)]
FrameCount = Annotated[int, Field(ge=1, le=100_000)]
PixelSides = Annotated[tuple[PixelSide, ...], SEVERAL, one_or_several(PixelSide, int)]
FrameCounts = Annotated[tuple[FrameCount, ...], SEVERAL, one_or_several(FrameCount, int)]
_ID = {"allowed": "text of letters, digits and . _ - that starts with a letter or digit"}
_EXTENSION = {"allowed": 'the extension of a file name, such as ".txt"'}
UnitFraction = Annotated[float, Field(ge=0, le=1)]


class InMemorySettings(SettingsBlock):
    compression: Literal["none", "auto", "lz4", "snappy", "zlib", "zstd"] | None = None
    """How files are stored in RAM. Unset or "none": unchanged. "auto": compressed if that saves at least 5 %."""
    memory_limit_gb: Annotated[float | None, Field(gt=0)] = None
    """Memory that the staged dataset may use, in GB of 2^30 bytes. Unset: the available memory of the machine."""
    num_workers: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Threads that stage files. Unset: the number of CPUs that this process may use, at most 72."""


class CaptionSettings(SettingsBlock):
    source: Literal["auto", "sidecar", "metadata", "filename", "constant", "none"] = "auto"
    """Where captions come from. "auto": `constant`, else a metadata file, else files beside the samples, else none."""
    extension: Annotated[str, Field(pattern=r"^\.[A-Za-z0-9_.-]+$", json_schema_extra=_EXTENSION)] = ".txt"
    """Extension of caption files beside the samples."""
    metadata_file: Path | None = None
    """A .jsonl, .csv or .parquet file with one row per sample. Unset: a file metadata.* in the dataset's folder."""
    file_column: Annotated[str, Field(min_length=1)] = "file_name"
    """Column of the metadata file with the path of the sample, relative to the dataset's folder."""
    caption_column: Annotated[str, Field(min_length=1)] = "text"
    """Column or field with the caption or a list of captions."""
    constant: str | None = None
    """One caption for all samples; needs source "auto" or "constant"."""
    several: bool = False
    """Each line of a caption file is a separate caption; one is chosen for each use."""
    choose: Literal["random", "first"] = "random"
    """Which of several captions is used: a random one in each epoch, chosen by the seed, or always the first."""
    trigger_word: str | None = None
    """Replaces `[trigger]` in a caption; put in front of captions that contain neither `[trigger]` nor this word."""
    dropout: UnitFraction = 0.0
    """Share of samples whose caption is replaced by an empty one, chosen in each epoch."""
    shuffle_tags: bool = False
    """Shuffle the tags of captions in each epoch."""
    keep_tags: Annotated[int, Field(ge=0)] = 0
    """Number of first tags that keep their positions when tags are shuffled."""
    tag_separator: Annotated[str, Field(min_length=1)] = ","
    """Separator of tags."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.source == "constant" and self.constant is None:
            yield SettingsIssue("constant", 'is missing: source is "constant"', ("source",))

    def warnings(self) -> Iterator[SettingsIssue]:
        if self.keep_tags and not self.shuffle_tags:
            yield SettingsIssue("keep_tags", "has no effect while shuffle_tags is false")
        if self.constant is not None and self.source not in ("auto", "constant"):
            yield SettingsIssue("constant", f'has no effect with source "{self.source}"')
        if self.metadata_file is not None and self.source not in ("auto", "metadata"):
            yield SettingsIssue("metadata_file", f'has no effect with source "{self.source}"')


class AudioSettings(SettingsBlock):
    sample_rate: Annotated[int, Field(ge=1000, le=768_000)] = 44_100
    """Sample rate in Hz to which sounds are resampled."""
    channels: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of channels to which sounds are mixed."""
    max_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Longer sounds are cut to this length."""
    step_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Sounds are cut to a multiple of this length, so that they can share batches."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        if self.step_seconds > self.max_seconds:
            yield SettingsIssue("step_seconds", f"{self.step_seconds:g} is above max_seconds {self.max_seconds:g}")


class AugmentSettings(SettingsBlock):
    flip: UnitFraction = 0.0
    """Probability of a horizontal flip."""
    crop_jitter: UnitFraction = 0.0
    """How far the crop may move from the centre, from 0 (not at all) to 1 (anywhere inside the image)."""
    brightness: UnitFraction = 0.0
    """Brightness is multiplied by a random factor from 1 - this to 1 + this."""
    contrast: UnitFraction = 0.0
    """Contrast is multiplied by a random factor from 1 - this to 1 + this."""
    saturation: UnitFraction = 0.0
    """Saturation is multiplied by a random factor from 1 - this to 1 + this."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Hue is rotated by a random angle from -this to this, in turns of the colour circle."""


class DatasetSettings(SettingsBlock):
    id: Annotated[str, Field(max_length=200, pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$", json_schema_extra=_ID)] = ""
    """Unique name. Unset: the name of the folder."""
    type: Literal["in_memory", "disk"] = "in_memory"
    """Where the dataset is staged: in shared RAM, or in a mapped file on disk."""
    dataset_type: MediaKind = MediaKind.IMAGE
    """The kind of samples."""
    instance_data_dir: Path | None = None
    """A folder of files, a WebDataset .tar file or a folder of them, a Hugging Face dataset saved to disk or as Parquet
    files, or "hub:OWNER/NAME": the copy of such a dataset in the hub's cache on this machine."""
    format: Literal["auto", "folder", "webdataset", "huggingface"] = "auto"
    """The format of `instance_data_dir`. "auto": detected."""
    in_memory: InMemorySettings = InMemorySettings()
    """How staging stores the files, and how much memory it may use."""
    captions: CaptionSettings = CaptionSettings()
    """Where captions come from and how they are changed."""
    resolution: PixelSides = (1024,)
    """Side in pixels of the square whose area samples are resized to, or a list of such sides."""
    resolution_mode: Literal["best", "each"] = "best"
    """With several resolutions: use a sample at the best one ("best"), or once at each ("each")."""
    bucket_step: Annotated[int, Field(ge=1, le=1024)] = 64
    """Width and height of samples are multiples of this."""
    max_aspect_ratio: Annotated[float, Field(ge=1, le=64)] = 2.0
    """Largest ratio of the longer to the shorter side; samples beyond it are cropped to it."""
    upscale: bool = True
    """Enlarge samples that are smaller than the resolution. false: they go to a bucket that they can fill."""
    frames: FrameCounts = (1,)
    """Video: frames per sample, or a list of numbers, of which a clip uses the largest that it can fill."""
    fps: Annotated[float | None, Field(gt=0, le=1000)] = None
    """Video: frames per second to which clips are resampled. Unset: as in the file."""
    audio: AudioSettings = AudioSettings()
    """Audio: sample rate, channels and lengths."""
    resize_filter: Literal["lanczos", "bicubic", "bilinear", "area"] = "lanczos"
    """Filter for resizing."""
    crop: Literal["center", "random"] = "center"
    """Which part is kept if a sample does not have the shape of its bucket. "random": another crop in each epoch,
    chosen by the seed."""
    augment: AugmentSettings = AugmentSettings()
    """Random changes to each sample, chosen by the seed in each epoch."""
    conditioning_dir: Path | None = None
    """For editing models: a folder of reference images, named like the samples that were made from them."""
    conditioning_resolution: PixelSide = 1024
    """Side in pixels of the square whose area the images of `conditioning_dir` are resized to."""
    repeats: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How often each sample is used in one epoch."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """How often samples of this dataset are used, relative to the other datasets."""
    loss_weight: Annotated[float, Field(ge=0, le=1_000_000)] = 1.0
    """Factor of the loss of its samples."""
    loss_weights_file: Path | None = None
    """A .jsonl, .csv or .parquet file with the columns `captions.file_column` and `weight`: a factor for the loss of
    each sample, multiplied by `loss_weight`. Samples that are not in the file have the factor 1."""
    mask_dir: Path | None = None
    """A folder of mask images named like the samples: the loss counts where the mask is white, and not where it is
    black."""
    mask_floor: UnitFraction = 0.0
    """Loss weight of the black parts of a mask; white parts have weight 1."""
    prior: bool = False
    """Prior preservation: the target of these samples is the prediction of the untrained model, so that its knowledge
    is kept."""
    limit: Annotated[int | None, Field(ge=1)] = None
    """Use only this many samples, for a first try."""
    strict: bool = False
    """Stop at the first broken file instead of setting it aside."""
    max_broken_share: UnitFraction = 0.05
    """Stop when more than this share of the files is broken."""
    check: Literal["structure", "decode"] = "structure"
    """How staging checks files: by their headers and structure, or by decoding each file."""
    held_out: bool = False
    """Do not train on this dataset; measure the loss on its samples at every validation."""
    augmentations_cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] | None = None
    """How a dataset with augmentations is cached. "disable_cache": not at all. "static": `variations` versions of each
    sample are cached and used in turn. "refresh_each_epoch": each epoch has new versions, encoded during the epoch
    before. Unset: "static"."""
    variations: Annotated[int, Field(ge=1, le=1000)] = 1
    """static: number of versions of each sample that are cached."""

    def contradictions(self) -> Iterator[SettingsIssue]:
        small = [side for side in self.resolution if side < self.bucket_step]
        if small:
            yield SettingsIssue("resolution", f"{small[0]} is below bucket_step {self.bucket_step}", ("bucket_step",))
        if self.dataset_type is not MediaKind.VIDEO and self.frames != (1,):
            message = f'{_numbers_text(self.frames)} needs dataset_type "video", not "{self.dataset_type}"'
            yield SettingsIssue("frames", message, ("dataset_type",))
        for name, field in (("frames", self.frames), ("resolution", self.resolution)):
            if len(set(field)) != len(field):
                yield SettingsIssue(name, f"{_numbers_text(field)} contains a value twice")
        if self.dataset_type is MediaKind.AUDIO:
            visual = [f"augment.{name}" for name, value in self.augment if value]
            for name in (*visual, *(["mask_dir"] if self.mask_dir is not None else [])):
                yield SettingsIssue(name, "has no meaning for sound; remove it", ("dataset_type",))
        if self.conditioning_dir is not None:
            yield from self._conditioning_contradictions()

    def _conditioning_contradictions(self) -> Iterator[SettingsIssue]:
        """Settings that cannot be combined with reference images: they would change a sample but not its reference, or
        need several sizes of it."""
        if self.dataset_type is not MediaKind.IMAGE:
            message = f'needs dataset_type "image", not "{self.dataset_type}"'
            yield SettingsIssue("conditioning_dir", message, ("dataset_type",))
        related = ("conditioning_dir",)
        changed = [f"augment.{name}" for name, value in self.augment if value]
        for name in (*changed, *(["crop"] if self.crop == "random" else [])):
            yield SettingsIssue(name, "would change the sample but not its reference image; remove it", related)
        if self.resolution_mode == "each" and len(self.resolution) > 1:
            yield SettingsIssue("resolution_mode", 'is not available with conditioning_dir; use "best"', related)

    def warnings(self) -> Iterator[SettingsIssue]:
        if "conditioning_resolution" in self.model_fields_set and self.conditioning_dir is None:
            yield SettingsIssue("conditioning_resolution", "has no effect without conditioning_dir")
        uneven = [side for side in self.resolution if side % self.bucket_step]
        if uneven and self.dataset_type is not MediaKind.AUDIO:
            message = f"{uneven[0]} is not a multiple of bucket_step {self.bucket_step}; buckets approximate it"
            yield SettingsIssue("resolution", message)
        odd = [count for count in self.frames if count % 4 != 1]
        if self.dataset_type is MediaKind.VIDEO and odd:
            message = f"{odd[0]} is not 4n + 1, as the encoders of video models need; they drop the remaining frames"
            yield SettingsIssue("frames", message)
        if "mask_floor" in self.model_fields_set and self.mask_dir is None:
            yield SettingsIssue("mask_floor", "has no effect without mask_dir")
        if self.prior and self.held_out:
            yield SettingsIssue("prior", "has no effect: the dataset is held out")
        if self.fps is not None and self.dataset_type is not MediaKind.VIDEO:
            yield SettingsIssue("fps", f'has no effect with dataset_type "{self.dataset_type}"')
        varies = self.crop == "random" or self.captions.shuffle_tags or any(value for _, value in self.augment)
        if self.variations > 1 and not varies:
            remedy = 'set augment, captions.shuffle_tags, or crop: "random"'
            yield SettingsIssue("variations", f"{self.variations} variations are identical: {remedy}")


class LoaderSettings(SettingsBlock):
    prefetch_batches: Annotated[int | None, Field(ge=0, le=1024)] = None
    """Batches to prefetch. Unset: 2; 0 if the model computes on the CPU and all samples are cached, because prefetching
    would only slow down the computation."""
    num_workers: Annotated[int | None, Field(ge=1, le=1024)] = None
    """Threads that decode. Unset: the number of CPUs that this process may use."""
    drop_last: bool = False
    """Leave out the last batch of a bucket in an epoch if it is not full."""

    @property
    def batches_ahead(self) -> int:
        """Batches to prefetch if the model does not compute on the CPU."""
        return 2 if self.prefetch_batches is None else self.prefetch_batches


def _numbers_text(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else str(list(numbers))
