"""The memory of loading an expert: every tensor in the order in which a run copies it to a device and quantizes it.

Bookkeeping of what `place_base_weights` in `step/expert_setup.py` does. Only quantizing one layer of each shape is
traced on fake tensors: hundreds of layers are alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from supertuner.config.settings.run_config import RunConfig
from supertuner.models.meta_modules import MetaDeviceMode
from supertuner.models.quantization import EightBitFormat, quantizable_layers, quantize_linear
from supertuner.models.spec import Expert, Family, ModelDescription
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.encoder_shapes import CPU, without_weights
from supertuner.plan.trace.execution_trace import OUTSIDE_BLOCKS, ExecutionTrace, TensorKind
from supertuner.plan.trace.recorder import PLAIN_CPU, TracedDevice, TraceRecorder
from supertuner.step import expert_setup
from supertuner.step.precision import ComputePrecision

LOADING = "load"
ALL_COPIES, LARGEST_COPY = "copies", "the largest copy"
"""Names in `ExecutionTrace.work_by_part`: copying all tensors in the format in which they are loaded, and the largest
of them."""


def trace_loading(
    config: RunConfig, family: Family, model: ModelDescription, expert: Expert, *, device: TracedDevice = PLAIN_CPU
) -> ExecutionTrace:
    """The memory in which the expert is placed. Tensors that outlive the phase are its weights; the others are layers
    in their previous format and temporaries of their quantization."""
    precision = ComputePrecision(config.train.mixed_precision, torch.device("meta"))
    with MetaDeviceMode():
        module = family.load_denoiser(without_weights(model), expert, expert_setup.weight_dtype(config, precision))
    kind = config.model.base_weights
    layers = {} if kind == "as_computed" else quantizable_layers(module)
    weights_kind = TensorKind.TRAINED if config.adapter.type == "full" else TensorKind.FROZEN
    log = _AllocationLog()
    quantization = cache(_trace_quantization)
    for nbytes in device.library_workspaces() if layers else ():
        log.allocate(nbytes, TensorKind.TEMPORARY)  # of the matrix products by which quantization is tested
    for layer in layers.values():
        assert kind != "as_computed"
        # The order of `place_tensors`: the weight, then the bias.
        log.append_trace(quantization(kind, layer.out_features, layer.in_features, layer.weight.dtype, device))
        if layer.bias is not None:
            log.allocate(layer.bias.nbytes, TensorKind.FROZEN)
    for name, part in module.named_modules():
        if name not in layers:
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                log.allocate(tensor.nbytes, weights_kind)
    copied = [tensor.nbytes for tensor in (*module.parameters(), *module.buffers())]
    copies = ((ALL_COPIES, sum(copied), len(copied)), (LARGEST_COPY, max(copied), 1))
    parts = tuple((name, OperatorWork(0.0, 0.0, float(nbytes), count)) for name, nbytes, count in copies)
    return replace(log.build_trace(device), work_by_part=parts)


def _trace_quantization(
    kind: EightBitFormat, rows: int, columns: int, dtype: torch.dtype, device: TracedDevice
) -> ExecutionTrace:
    """Quantizing one weight. It exists at the begin; what outlives the trace is the quantized weight."""
    recorder = TraceRecorder(device, threads=1)
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=CPU), requires_grad=False)
        recorder.register_tensor(layer.weight, TensorKind.TEMPORARY)
        with device.emulate_dispatch(), recorder:
            quantized = quantize_linear(layer, kind)
        recorder.register_tensor(quantized.weight, TensorKind.FROZEN)
        trace = recorder.build_trace("quantize")
        del quantized
    return trace


class _AllocationLog:
    """Allocations and releases in order, one tick each."""

    def __init__(self) -> None:
        self._clock = 0
        self._nbytes: list[int] = []
        self._kind: list[int] = []
        self._birth: list[int] = []
        self._death: list[int | None] = []

    def allocate(self, nbytes: int, kind: int) -> int:
        """Returns the number of the tensor."""
        self._clock += 1
        self._nbytes.append(nbytes)
        self._kind.append(kind)
        self._birth.append(self._clock)
        self._death.append(None)
        return len(self._nbytes) - 1

    def append_trace(self, trace: ExecutionTrace) -> None:
        """All tensors of a trace, allocated and released in its order."""
        births = [(int(tick), True, number) for number, tick in enumerate(trace.birth)]
        deaths = [(int(tick), False, number) for number, tick in enumerate(trace.death) if tick < trace.end]
        numbers: dict[int, int] = {}
        for _, is_birth, number in sorted(births + deaths):
            if is_birth:
                numbers[number] = self.allocate(int(trace.nbytes[number]), int(trace.kind[number]))
            else:
                self._clock += 1
                self._death[numbers[number]] = self._clock

    def build_trace(self, device: TracedDevice) -> ExecutionTrace:
        end = self._clock + 1
        return ExecutionTrace(
            phase=LOADING,
            device=device.name,
            alignment_bytes=device.alignment_bytes,
            blocks=OUTSIDE_BLOCKS,
            nbytes=np.array(self._nbytes, dtype=np.int64),
            birth=np.array(self._birth, dtype=np.int64),
            death=np.array([end if tick is None else tick for tick in self._death], dtype=np.int64),
            kind=np.array(self._kind, dtype=np.uint8),
            block=np.zeros(len(self._nbytes), dtype=np.int16),
            spans=(),
            end=end,
            block_inputs=np.zeros((0, 2), dtype=np.int32),
        )
