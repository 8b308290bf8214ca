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

from supertuner.config.settings.block import Block
from supertuner.core.types import JSON
from supertuner.models.spec import Source
from supertuner.train.checkpoint.state import versions
from supertuner.train.run import Run

if TYPE_CHECKING:
    from supertuner.models.spec import Expert

ARCHITECTURES: Final[Mapping[str, str]] = {
    "flux": "flux-1",
    "sd3.5": "stable-diffusion-3.5",
    "sdxl": "stable-diffusion-xl-v1-base",
}
"""Family → ModelSpec's word for its architecture, where it is another."""
SECTIONS: Final = ("adapter", "objective", "optimizer")
"""Of the configuration: those that say how it was trained. Others name folders, or only how fast."""
OWN: Final = "supertuner"
SPEC: Final = "modelspec."


def described(run: Run, expert: Expert, own: Mapping[str, str], tensors: Iterable[memoryview]) -> dict[str, str]:
    """Metadata of a file with these bytes of tensors. `own`: what the adapter says of its making."""
    trained = json.loads(own.get(OWN, "{}"))
    family = run.family.name
    digest = hashlib.sha256()
    for chunk in tensors:
        digest.update(chunk)
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{ARCHITECTURES.get(family, family)}/{trained.get('type', 'lora')}",
        "implementation": "https://github.com/huggingface/diffusers",
        "title": run.name if len(run.model.experts) == 1 else f"{run.name}, {expert.name}",
        "hash_sha256": f"0x{digest.hexdigest()}",
    }
    prediction = run.model.prediction or run.family.prediction
    if prediction != "flow":  # for which ModelSpec has no word
        spec["prediction_type"] = prediction
    facts: dict[str, JSON] = {
        **trained,
        "run": run.name,
        "family": family,
        "base_model": _base_model(run.model.source),
        "revision": run.model.source.revision,
        "step": run.step,
        "samples": run.samples,
        "seed": run.config.run.seed,
        "versions": {name: number for name, number in versions().items() if name != "threads"},
        "settings": {name: _settings(getattr(run.config, name)) for name in SECTIONS},
    }
    return {**own, **{SPEC + key: text for key, text in spec.items()}, OWN: json.dumps(facts, sort_keys=True)}


def _base_model(source: Source) -> str:
    """A name on the hub, or a folder's own name: where it lies is nobody's business."""
    return Path(source.path).name if Path(source.path).is_dir() else source.path


def _settings(block: Block) -> JSON:
    given: JSON = block.model_dump(mode="json", exclude_defaults=True)
    return _without_folders(given)


def _without_folders(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value
