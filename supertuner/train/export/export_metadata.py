"""The metadata of an exported adapter file, by Stability's ModelSpec 1.0.1, with a record of how it was trained.

Equal runs give equal metadata, without times and folders of the machine: the files of a run and of the same run after a
resume are equal to the byte, and can be published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supertuner.config.settings.block import SettingsBlock
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import JSON, MediaKind
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource
from supertuner.train.checkpoint.state import library_versions

RECORDED_SECTIONS: Final = ("adapter", "objective", "optimizer")
"""Sections of the configuration that affect the result. Others contain folders, or affect only the speed."""
SUPERTUNER_KEY: Final = "supertuner"
MODELSPEC_PREFIX: Final = "modelspec."


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What exported files record of their run."""

    name: str
    config: RunConfig
    family: Family
    model: ModelDescription
    step: int
    samples: int
    """Samples that were trained on up to this step."""


def export_stem(run: RunFacts, expert: Expert, mark: str = "") -> str:
    """The name of an expert's file without its ending. `mark` distinguishes several files of an expert."""
    suffix = f"_{expert.name}" if len(run.model.experts) > 1 else ""
    return f"{run.name}-step{run.step:08d}{mark}{suffix}"


def build_metadata(run: RunFacts, expert: Expert, adapter_metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of an expert's file, but for the hash. `adapter_metadata` comes from the adapter itself."""
    adapter_facts = json.loads(adapter_metadata.get(SUPERTUNER_KEY, "{}"))
    family = run.family.name
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{run.family.modelspec_architecture or family}/{adapter_facts.get('type', 'lora')}",
        "implementation": "https://github.com/huggingface/diffusers",
        "title": run.name if len(run.model.experts) == 1 else f"{run.name}, {expert.name}",
    }
    prediction = run.model.prediction or run.family.prediction
    if prediction != "flow":  # ModelSpec has no name for flow matching
        spec["prediction_type"] = prediction
    facts: dict[str, JSON] = {
        **adapter_facts,
        "run": run.name,
        "family": family,
        "base_model": base_model_name(run.model.source),
        "task": hub_task(run.model),
        "revision": run.model.source.revision,
        "step": run.step,
        "samples": run.samples,
        "seed": run.config.run.seed,
        "versions": {name: number for name, number in library_versions().items() if name != "threads"},
        "settings": {name: _changed_settings(getattr(run.config, name)) for name in RECORDED_SECTIONS},
    }
    return {
        **adapter_metadata,
        **{MODELSPEC_PREFIX + key: text for key, text in spec.items()},
        SUPERTUNER_KEY: json.dumps(facts, sort_keys=True),
    }


def add_tensor_hash(metadata: Mapping[str, str], tensors: Iterable[memoryview]) -> dict[str, str]:
    """The metadata with ModelSpec's hash of the file's tensors, which have these bytes."""
    digest = hashlib.sha256()
    for chunk in tensors:
        digest.update(chunk)
    return {**metadata, f"{MODELSPEC_PREFIX}hash_sha256": f"0x{digest.hexdigest()}"}


def hub_task(model: ModelDescription) -> str:
    """What a pipeline of the model does, as the hub names it (`pipeline_tag`)."""
    if model.edits_images:
        return "image-to-image"
    output = "video" if MediaKind.VIDEO in model.media_kinds else "image"
    return f"{'image' if model.needs_first_frame else 'text'}-to-{output}"


def base_model_name(source: ModelSource) -> str:
    """The model's name on the hub, or the last part of a local folder: its location is private."""
    return Path(source.path).name if Path(source.path).is_dir() else source.path


def _changed_settings(block: SettingsBlock) -> JSON:
    settings: JSON = block.model_dump(mode="json", exclude_defaults=True)
    return strip_folders(settings)


def strip_folders(value: JSON) -> JSON:
    """The value with only the last part of every path in it: folders of the machine are private."""
    if isinstance(value, dict):
        return {key: strip_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strip_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value
