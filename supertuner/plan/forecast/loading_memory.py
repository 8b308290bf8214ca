"""The memory of loading weights: of the device, from the trace of loading, and of the host.

The libraries map .safetensors files. They copy a tensor to host memory if its number format is not the requested one.
Each tensor is then copied once more on its way to its device, one after the other. Pages of mapped files are not
counted: the kernel releases them when memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from supertuner.config.settings.model import single_file_setting
from supertuner.models import loading
from supertuner.models.spec import ModelSource
from supertuner.plan.forecast.results import PhaseForecast
from supertuner.plan.forecast.run_model import ExpertForecast, RunModel
from supertuner.plan.placement.run_plans import loads_to_host
from supertuner.plan.trace.execution_trace import ExecutionTrace, TensorKind
from supertuner.plan.trace.loading_phase import ALL_COPIES, LARGEST_COPY
from supertuner.step.expert_setup import weight_dtype
from supertuner.step.precision import DTYPES, ComputePrecision

LOADED_COPIES = "weights while they are loaded"
UNKNOWN_FILES = (
    f"{LOADED_COPIES}: at most, for files in another number format than the computation; the files are not on this "
    "machine"
)


@dataclass(frozen=True, slots=True)
class ExpertLoading:
    """The memory of loading one expert."""

    trace: ExecutionTrace
    """The memory in which the expert is placed."""
    copied_bytes: int
    """Bytes that the libraries copy to host memory before that."""
    to_host: bool
    """Whether it is placed in host memory, although the run computes on a GPU."""
    adapter_bytes: int
    """Of its adapter, which is attached before the next expert is loaded."""
    files_here: bool = True
    """Whether its files are on this machine; False: `copied_bytes` is an upper limit."""

    @property
    def resident_bytes(self) -> int:
        """What stays in the memory in which it is placed."""
        weights = self.trace.allocated_bytes()[self.trace.kind != TensorKind.TEMPORARY]
        return int(weights.sum()) + self.adapter_bytes

    @property
    def host_bytes_to_gpu(self) -> int:
        """The peak of host memory if the expert is placed on a GPU."""
        return self.copied_bytes + _copy_bytes(self.trace, LARGEST_COPY)

    @property
    def bytes_in_one_memory(self) -> int:
        """The peak if the expert is placed in host memory: each copy is released when its tensor has been placed."""
        temporary = int(self.trace.live_bytes_of_kind(TensorKind.TEMPORARY).max())
        return max(self.trace.peak()[0], self.copied_bytes + temporary, self.host_bytes_to_gpu)

    @property
    def host_bytes_in_pool(self) -> int:
        """`bytes_in_one_memory` without the memory in which it is placed, for a GPU that shares the host's memory."""
        return self.bytes_in_one_memory - self.trace.peak()[0]


def with_loading_host_bytes(phase: PhaseForecast, host_bytes: int) -> PhaseForecast:
    """The phase with host memory that loading weights takes in it."""
    return replace(phase, host={**phase.host, LOADED_COPIES: host_bytes}) if host_bytes else phase


def encoder_host_bytes(run: RunModel, name: str, trace: ExecutionTrace) -> int:
    """Peak of host memory while the encoders whose components begin with `name` are loaded to a GPU, one after the
    other. `trace`: encoding; if files are not on this machine, all its weights count as copied."""
    if run.capacity.on_cpu:
        return 0  # they stay where they are loaded
    dtype = torch.float32 if name == "vae" else DTYPES[run.config.train.mixed_precision]
    weights = trace.nbytes[trace.kind == TensorKind.FROZEN]
    components = [part for part in run.traces.model.configs if part.startswith(name)]
    copied = [loading.copied_bytes(_file_source(run), part, dtype) for part in components]
    host = max((int(weights.sum()) if one is None else one for one in copied), default=0) + int(weights.max())
    # In one pool a copy is released when its tensor has been placed, long before the peak of encoding.
    return max(0, host - trace.peak()[0]) if run.capacity.one_pool else host


def expert_loading(run: RunModel, one: ExpertForecast) -> ExpertLoading:
    """The memory of loading an expert of the run."""
    config, plan, trace = run.config, one.steps.plan, run.traces.loading_trace(one.expert)
    dtype = weight_dtype(config, ComputePrecision(config.train.mixed_precision, torch.device("cpu")))
    copied = loading.copied_bytes(_file_source(run), one.expert.component, dtype)
    adapter = 0 if config.adapter.type == "full" else one.trace.live_bytes_by_kind(0)[TensorKind.TRAINED]
    to_host = plan is not None and loads_to_host(config, plan)
    copied_bytes = _copy_bytes(trace, ALL_COPIES) if copied is None else copied
    return ExpertLoading(trace, copied_bytes, to_host, adapter, files_here=copied is not None)


def _copy_bytes(trace: ExecutionTrace, part: str) -> int:
    return int(dict(trace.work_by_part)[part].gpu_bytes)


def _file_source(run: RunModel) -> ModelSource:
    """Where the run's weight files would be on this machine."""
    settings, (first, *later) = run.config.model, run.traces.model.experts
    names = {first.component: "single_file", **{one.component: single_file_setting(one.name) for one in later}}
    chosen = settings.single_files
    files = {component: chosen[name] for component, name in names.items() if name in chosen}
    return ModelSource(run.traces.model.source.path, settings.revision, settings.variant, single_files=files)
