"""`supertuner models`: families and published models, what each does, and the size of its weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from supertuner.config.families import FAMILIES, experts_of, target_presets_of
from supertuner.core.errors import OptionError
from supertuner.core.host import HostFacts
from supertuner.core.types import JSON, bytes_text
from supertuner.models.published_models import PublishedModel, models_of_family
from supertuner.plan.forecast.results import HOST_SHARE, TIGHT_SHARE, MachineCapacity, capacity_text
from supertuner.plan.forecast.target_machine import find_machine_capacity

LIMITS_OF_WEIGHTS = "this is no forecast, activations come on top; `supertuner init` forecasts a run for your data"


def require_family(name: str) -> str:
    """The family's name. Raises OptionError with the nearest name if there is none."""
    if name in FAMILIES:
        return name
    guess = get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.5)
    hint = f"did you mean {guess[0]}? " if guess else ""
    raise OptionError(f"{name!r} is not a family; {hint}Set `family` to one of {', '.join(FAMILIES)}")


def find_capacity(machine: str) -> MachineCapacity:
    return find_machine_capacity(machine, HostFacts())


def list_models(family: str | None) -> Mapping[str, Mapping[str, PublishedModel]]:
    """Family → its models by their names on the hub."""
    names = FAMILIES if family is None else (require_family(family),)
    return {name: models_of_family(name) for name in names}


def family_text(family: str) -> str:
    """What all models of a family have in common."""
    experts = experts_of(family)
    trained = f"experts: {' and '.join(experts)}, in models with two; " if experts else ""
    return f"{trained}adapter.targets: {', '.join(target_presets_of(family))}"


@dataclass(frozen=True, slots=True)
class WeightsFit:
    """Whether an adapter may fit a machine by the size of the weights alone."""

    possible: bool
    text: str


def weights_fit(model: PublishedModel, capacity: MachineCapacity) -> WeightsFit:
    """16-bit weights before 8-bit ones, on the GPU before in host memory.

    The trainer can keep idle experts and streamed weights in host memory. A machine with one pool has none for them;
    neither has one whose host memory is unknown.
    """
    limit = capacity.host_bytes if capacity.on_cpu else capacity.gpu_limit_bytes
    if limit is None:
        return WeightsFit(True, "not known")
    gpu_bytes = TIGHT_SHARE * limit
    host_bytes = 0.0 if capacity.one_pool or capacity.on_cpu else HOST_SHARE * (capacity.host_bytes or 0)
    for bits, denoiser in ((16, model.weights.denoiser), (8, model.weights.denoiser_8bit)):
        total = model.experts * denoiser
        share = f"{bytes_text(total)} of {bytes_text(limit)}"
        if total <= gpu_bytes:
            return WeightsFit(True, f"may fit in {bits} bits: {share}")
        if denoiser <= gpu_bytes and total - denoiser <= host_bytes:
            share = f"{bytes_text(denoiser)} of {bytes_text(limit)}"
            return WeightsFit(True, f"may fit in {bits} bits, one expert at a time: {share}")
        if total <= host_bytes:
            return WeightsFit(True, f"may fit in {bits} bits, streamed from host memory")
    unknown_host = capacity.host_bytes is None and not capacity.one_pool
    reason = ": its host memory is not known" if unknown_host else ""
    return WeightsFit(False, f"does not fit{reason}")


def models_json(
    families: Mapping[str, Mapping[str, PublishedModel]], capacity: MachineCapacity | None
) -> dict[str, JSON]:
    """Everything as JSON values; sizes in bytes."""
    listed: dict[str, JSON] = {
        family: {
            "adapter_targets": list(target_presets_of(family)),
            "models": {name: _model_json(model, capacity) for name, model in models.items()},
        }
        for family, models in families.items()
    }
    result: dict[str, JSON] = {"families": listed}
    if capacity is not None:
        result["machine"] = {"key": capacity.machine.key, "title": capacity.title, "fit_is": LIMITS_OF_WEIGHTS}
    return result


def _model_json(model: PublishedModel, capacity: MachineCapacity | None) -> dict[str, JSON]:
    fit: dict[str, JSON] = {} if capacity is None else {"lora_by_weights_alone": asdict(weights_fit(model, capacity))}
    return {"task": model.task, "experts": model.experts, "weight_bytes": asdict(model.weights), **fit}


def model_rows(
    families: Mapping[str, Mapping[str, PublishedModel]], capacity: MachineCapacity | None
) -> list[tuple[str, ...]]:
    """One row per model, as text: family, name, task, experts, sizes of a denoiser and of the encoders, fit."""
    return [
        (
            family,
            name,
            model.task,
            str(model.experts),
            *(bytes_text(nbytes) for nbytes in asdict(model.weights).values()),
            *(() if capacity is None else (weights_fit(model, capacity).text,)),
        )
        for family, models in families.items()
        for name, model in models.items()
    ]


def machine_text(capacity: MachineCapacity) -> str:
    return f"{capacity_text(capacity)} ({capacity.source})"
