"""What a checkpoint's adapters are, beyond the bytes that were written: loaded, their keys counted, all finite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supertuner.core.errors import ModelError
from supertuner.models.adapters.keys import read
from supertuner.models.adapters.keys_convert import layers_of

if TYPE_CHECKING:
    from torch import Tensor

PREFIXES: Final = ("adapter.", "ema.")
WEIGHTS: Final = (".weight", ".bias", "scale_shift_table")


@dataclass(frozen=True, slots=True)
class Looked:
    part: str
    said: str
    problems: tuple[str, ...]


def look(checkpoint: Path) -> list[Looked]:
    """Every trained part of a checkpoint that is known to be whole."""
    from supertuner.train.checkpoint.load import Parts, read_manifest

    folder = checkpoint.resolve()
    parts = Parts(folder, read_manifest(folder))
    return [_looked(checkpoint, part, parts[part]) for part in parts if part.startswith(PREFIXES)]


def _looked(checkpoint: Path, part: str, tensors: dict[str, Tensor]) -> Looked:
    file = f"{checkpoint / part}.safetensors"
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    problems = [f"{file}: {len(bad)} of {len(tensors)} tensors are not finite ({', '.join(bad[:3])})"] if bad else []
    try:
        found = read(tensors)
    except ModelError as error:
        if tensors and all(name.endswith(WEIGHTS) for name in tensors):  # a full fine-tune, or whole differences
            return Looked(part, f"{len(tensors)} weights", tuple(problems))
        return Looked(part, "not an adapter", (*problems, f"{file}: {error}"))
    if found.unknown:
        problems.append(f"{file}: {found.report()}")
    layers = layers_of(found)
    return Looked(part, f"{found.report()}, {len(layers)} layers of {' or '.join(found.families)}", tuple(problems))
