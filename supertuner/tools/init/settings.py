"""The settings of `supertuner init` that follow from the data, each with its reason; no forecast is needed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from supertuner.core.types import JSON, MediaKind, bytes_text
from supertuner.models.published_models import PublishedModel
from supertuner.tools.init.folder_survey import FolderSurvey

SIDES = (1024, 768, 640, 512, 384, 256)
MAX_VIDEO_SIDE = 640
"""The area of 832 × 480 pixels, rounded; a clip has many times the tokens of a picture."""
ENLARGED = 1.05
"""Files may be enlarged by this factor."""
CLIP_FRAMES = (81, 49, 33, 17, 9, 5, 1)
"""Lengths of clips: 4n + 1 frames, as the encoders of video models need."""
DEFAULT_FPS = 16
WINDOW = 4
"""Samples per optimizer step: a common choice for adapters on small datasets."""
DRAWS_PER_SAMPLE, MAX_DRAWS = 100, 6000
"""A rule of thumb for adapters: each sample up to 100 times, 6000 samples in all."""
VALIDATIONS = 5


@dataclass(frozen=True, slots=True)
class ChosenSetting:
    """A setting and why it has its value."""

    path: str
    value: JSON
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model to train."""

    family: str
    path: str
    published: PublishedModel | None
    """None: it is not in the table."""

    @property
    def fps(self) -> int:
        return DEFAULT_FPS if self.published is None else self.published.fps


def settings_from_data(model: ModelChoice, survey: FolderSurvey, trigger_word: str | None) -> list[ChosenSetting]:
    """Everything but what the search decides: batch, recomputation, 8-bit weights."""
    epochs, steps = training_length(survey.usable)
    every = max(1, int(round(steps / VALIDATIONS, -1 if steps >= 20 * VALIDATIONS else 0)))
    each = f"{VALIDATIONS} times in about {steps:,} steps"
    thumb = "a rule of thumb: compare the samples, and stop when they get worse"
    draws = (
        f"{survey.usable:,} samples × {epochs} epochs in steps of {min(WINDOW, survey.usable)}: about {steps:,} steps"
    )
    return [
        ChosenSetting("run.name", run_name(survey.folder.name, model.family), "the run's folder below runs/"),
        ChosenSetting("model.family", model.family),
        ChosenSetting("model.path", model.path, _weights_reason(model.published)),
        ChosenSetting("adapter.type", "lora", "a low-rank adapter; lokr, locon and loha are LyCORIS's kinds"),
        ChosenSetting("adapter.rank", 16, "the default: enough for a subject or a style"),
        *_dataset_settings(model, survey, trigger_word),
        ChosenSetting("cache_config.persistent_cache", True, "the next run does not encode the data again"),
        ChosenSetting("train.num_epochs", epochs, f"{draws}; {thumb}"),
        ChosenSetting("train.max_grad_norm", 1.0, "one unusual batch cannot undo many steps"),
        ChosenSetting("plan.act", "auto"),
        ChosenSetting("optimizer.name", "adamw"),
        ChosenSetting("optimizer.learning_rate", 1e-4, "the optimizer's default for adapters"),
        ChosenSetting("checkpoints.every_steps", every, f"{each}; each checkpoint is exported"),
        ChosenSetting("exports.formats", ["diffusers", "comfyui"], "the names of keys in the exported files"),
        *_prompt_settings(survey),
        ChosenSetting("validation.every_steps", every, f"{each}, beside each checkpoint"),
    ]  # fmt: skip


def training_length(samples: int) -> tuple[int, int]:
    """Epochs and optimizer steps for this many samples."""
    epochs = max(1, min(DRAWS_PER_SAMPLE, round(MAX_DRAWS / samples)))
    return epochs, max(1, -(-samples * epochs // min(WINDOW, samples)))


def run_name(folder: str, family: str) -> str:
    """A name that `run.name` accepts."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder}-{family}").strip("-._")
    return words[:100]


def _weights_reason(published: PublishedModel | None) -> str:
    if published is None:
        return ""
    weights, count = published.weights, published.experts
    denoisers = "a denoiser" if count == 1 else f"{count} experts"
    sizes = f"{bytes_text(weights.denoiser)} in 16 bits, {bytes_text(weights.denoiser_8bit)} in 8 bits"
    return f"{published.task}; {denoisers} of {sizes}"


def _dataset_settings(model: ModelChoice, survey: FolderSurvey, trigger_word: str | None) -> list[ChosenSetting]:
    side, is_video = survey.median_side, survey.kind is MediaKind.VIDEO
    limit = MAX_VIDEO_SIDE if is_video else SIDES[0]
    resolution = next((one for one in SIDES if one <= min(limit, ENLARGED * side)), SIDES[-1])
    size = f"the median file has the area of {side}×{side} pixels"
    if resolution == limit:
        size += f"; {limit} is the most that init chooses for {survey.kind}s"
    elif resolution > ENLARGED * side:
        size += ", so files are enlarged; use larger files if you have them"
    settings = [
        ChosenSetting("datasets[0].dataset_type", survey.kind.value),
        ChosenSetting("datasets[0].instance_data_dir", str(survey.folder), survey_text(survey)),
        ChosenSetting("datasets[0].resolution", resolution, size),
    ]
    if is_video:
        available = survey.clip_frames(model.fps)
        frames = next((count for count in CLIP_FRAMES if count <= available), 1)
        length = f"nearly all clips have {available} frames at {model.fps} per second; shorter ones are not used"
        settings += [
            ChosenSetting("datasets[0].frames", frames, length),
            ChosenSetting("datasets[0].fps", model.fps, "the rate of the model's own videos"),
            ChosenSetting("validation.fps", model.fps),
        ]
    if trigger_word:
        reason = "put in front of captions that do not contain it; write it in your prompts"
        settings.append(ChosenSetting("datasets[0].captions.trigger_word", trigger_word, reason))
    return settings


def survey_text(survey: FolderSurvey) -> str:
    """What the folder holds, in one or two sentences."""
    noun = survey.kind.value + ("" if survey.files == 1 else "s")
    text = f"{survey.files:,} {noun}, {captions_text(survey)}"
    if survey.broken:
        first = f"{survey.broken[0].file}: {survey.broken[0].reason}"
        remedy = "remove them: a run sets few files aside, and stops at many (max_broken_share)"
        text += f"; {len(survey.broken)} of the files that were read are broken ({first}); {remedy}"
    return text


def captions_text(survey: FolderSurvey) -> str:
    if survey.captioned == survey.files:
        return "each with a caption"
    if survey.captioned:
        return f"only {survey.captioned:,} of them with a caption"
    return "without captions: put a .txt beside each file, or the model learns no words"


def _prompt_settings(survey: FolderSurvey) -> list[ChosenSetting]:
    if not survey.prompts:
        return [ChosenSetting("validation.prompts", [], "the data has no captions: write prompts here")]
    origin = "captions of your data" if survey.captioned else "the trigger word, because the data has no captions"
    return [ChosenSetting("validation.prompts", list(survey.prompts), f"{origin}; write your own")]
