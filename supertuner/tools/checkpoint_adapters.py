"""What a checkpoint's adapters are, beyond the bytes that were written: loaded, their keys counted, all finite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import read_keys
from supertuner.models.adapters.keys_convert import adapter_layers

if TYPE_CHECKING:
    from torch import Tensor

TRAINED_PART_PREFIXES: Final = ("adapter.", "ema.")
WEIGHT_SUFFIXES: Final = (".weight", ".bias", "scale_shift_table")


@dataclass(frozen=True, slots=True)
class CheckpointPartReport:
    part: str
    summary: str
    problems: tuple[str, ...]


def inspect_checkpoint(checkpoint: Path) -> list[CheckpointPartReport]:
    """Every trained part of a checkpoint that is known to be whole."""
    from supertuner.train.checkpoint.load import CheckpointParts, read_manifest

    folder = checkpoint.resolve()
    parts = CheckpointParts(folder, read_manifest(folder))
    return [_inspect_part(checkpoint, part, parts[part]) for part in parts if part.startswith(TRAINED_PART_PREFIXES)]


def _inspect_part(checkpoint: Path, part: str, tensors: dict[str, Tensor]) -> CheckpointPartReport:
    file = f"{checkpoint / part}.safetensors"
    not_finite = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    problems = (
        [f"{file}: {len(not_finite)} of {len(tensors)} tensors are not finite ({', '.join(not_finite[:3])})"]
        if not_finite
        else []
    )
    try:
        reading = read_keys(tensors)
    except ModelError as error:
        if tensors and all(
            name.endswith(WEIGHT_SUFFIXES) for name in tensors
        ):  # a full fine-tune, or whole differences
            return CheckpointPartReport(part, f"{len(tensors)} weights", tuple(problems))
        return CheckpointPartReport(part, "not an adapter", (*problems, f"{file}: {error}"))
    if reading.unknown:
        problems.append(f"{file}: {reading.summary()}")
    layers = adapter_layers(reading)
    return CheckpointPartReport(
        part, f"{reading.summary()}, {len(layers)} layers of {' or '.join(reading.families)}", tuple(problems)
    )
