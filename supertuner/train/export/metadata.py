"""What an exported adapter tells of itself: Stability's ModelSpec 1.0.1, and what is needed to trace the run.

The same run gives the same text: nothing here tells the time or a folder of the machine it ran on, so that files of a
run and of its resumed twin are equal to the byte, and can be given away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.config.settings.block import SettingsBlock
from supertuner.core.types import JSON
from supertuner.models.spec import ModelSource
from supertuner.train.checkpoint.state import library_versions
from supertuner.train.run.training_run import TrainingRun

if TYPE_CHECKING:
    from supertuner.models.spec import Expert

ARCHITECTURES: Final[Mapping[str, str]] = {
    "flux": "flux-1",
    "sd3.5": "stable-diffusion-3.5",
    "sdxl": "stable-diffusion-xl-v1-base",
}
"""Family → ModelSpec's word for its architecture, where it is another."""
RECORDED_SECTIONS: Final = ("adapter", "objective", "optimizer")
"""Of the configuration: those that say how it was trained. Others name folders, or only how fast."""
SUPERTUNER_KEY: Final = "supertuner"
MODELSPEC_PREFIX: Final = "modelspec."


def build_metadata(
    run: TrainingRun, expert: Expert, adapter_metadata: Mapping[str, str], tensors: Iterable[memoryview]
) -> dict[str, str]:
    """Metadata of a file with these bytes of tensors. `own`: what the adapter says of its making."""
    adapter_facts = json.loads(adapter_metadata.get(SUPERTUNER_KEY, "{}"))
    family = run.family.name
    digest = hashlib.sha256()
    for chunk in tensors:
        digest.update(chunk)
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{ARCHITECTURES.get(family, family)}/{adapter_facts.get('type', 'lora')}",
        "implementation": "https://github.com/huggingface/diffusers",
        "title": run.name if len(run.model.experts) == 1 else f"{run.name}, {expert.name}",
        "hash_sha256": f"0x{digest.hexdigest()}",
    }
    prediction = run.model.prediction or run.family.prediction
    if prediction != "flow":  # for which ModelSpec has no word
        spec["prediction_type"] = prediction
    facts: dict[str, JSON] = {
        **adapter_facts,
        "run": run.name,
        "family": family,
        "base_model": _base_model(run.model.source),
        "revision": run.model.source.revision,
        "step": run.step,
        "samples": run.samples_consumed,
        "seed": run.config.run.seed,
        "versions": {name: number for name, number in library_versions().items() if name != "threads"},
        "settings": {name: _changed_settings(getattr(run.config, name)) for name in RECORDED_SECTIONS},
    }
    return {
        **adapter_metadata,
        **{MODELSPEC_PREFIX + key: text for key, text in spec.items()},
        SUPERTUNER_KEY: json.dumps(facts, sort_keys=True),
    }


def _base_model(source: ModelSource) -> str:
    """A name on the hub, or a folder's own name: where it lies is nobody's business."""
    return Path(source.path).name if Path(source.path).is_dir() else source.path


def _changed_settings(block: SettingsBlock) -> JSON:
    settings: JSON = block.model_dump(mode="json", exclude_defaults=True)
    return _strip_folders(settings)


def _strip_folders(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _strip_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_strip_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value
