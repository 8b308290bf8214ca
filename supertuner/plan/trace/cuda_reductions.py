"""Workspaces of a CUDA reduction (sum, mean, norm): buffers that several thread blocks of one output share. Pure.

The arithmetic of PyTorch 2.13's `ATen/native/cuda/Reduce.cuh` (`setReduceConfig`, `global_memory_size`) on the strides
that its TensorIterator computes. The gradient of a bias is such a sum over all tokens, and its buffer can be larger
than the gradient of the layer's output. tests/phantom/test_kernels.py compares it with torch's CUDA build on the
phantom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_THREADS = 512
WARP_SIZE = 32
MIN_VALUES_PER_THREAD = 16
MAX_VALUES_PER_THREAD = 256
VECTOR_WIDTH = 4
MAX_INDEXABLE_BYTES = 2**31 - 1
"""A larger tensor is reduced in pieces."""


@dataclass(frozen=True, slots=True)
class GpuChip:
    """The properties of a GPU that determine how kernels divide their work."""

    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int


GH200_CHIP = GpuChip((9, 0), 132, 2048)
"""Also H100. Other NVIDIA chips select other kernels and divide work differently, which changes a peak by less than one
per cent (docs/forecast.md); forecasts for them use these values."""


def reduction_workspaces(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced_dims: Sequence[int],
    element_bytes: int,
    chip: GpuChip,
    *,
    accumulator_bytes: int = 4,
) -> tuple[int, ...]:
    """Sizes of the buffer for partial results and of its semaphores; empty if one thread block computes each output.

    `strides` count elements. `accumulator_bytes`: size of the type that is accumulated in, fp32 for 16-bit formats.
    """
    reduced = {dimension % len(shape) for dimension in reduced_dims} if shape else set()
    rows = enumerate(zip(shape, strides, strict=True))
    sizes = [(size, stride * element_bytes, index in reduced) for index, (size, stride) in rows if size != 1]
    dimensions = _split_to_32bit_range(_coalesce_dimensions(sizes))
    inputs = outputs = 1
    for size, _, is_reduced in dimensions:
        inputs, outputs = (inputs * size, outputs) if is_reduced else (inputs, outputs * size)
    if inputs * outputs == 0:
        return ()
    return _buffer_sizes(dimensions, inputs, outputs, element_bytes, accumulator_bytes, chip)


def _coalesce_dimensions(dimensions: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """TensorIterator's order: reduced dimensions first, then by stride; dimensions that are contiguous are merged."""
    ordered = sorted(dimensions, key=lambda one: (not one[2], one[1]))
    joined: list[tuple[int, int, bool]] = []
    for size, stride, is_reduced in ordered:
        if joined and joined[-1][2] == is_reduced and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1], is_reduced)
        else:
            joined.append((size, stride, is_reduced))
    return joined


def _split_to_32bit_range(dimensions: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Halves the widest dimension until 32 bits can address the rest, and keeps the larger half: the pieces are reduced
    one after the other, so the largest one determines the buffer."""
    while sum((size - 1) * stride for size, stride, _ in dimensions) >= MAX_INDEXABLE_BYTES:
        widest = max(range(len(dimensions)), key=lambda index: (dimensions[index][0] - 1) * dimensions[index][1])
        size, stride, is_reduced = dimensions[widest]
        dimensions = [*dimensions[:widest], (size - size // 2, stride, is_reduced), *dimensions[widest + 1 :]]
    return dimensions


def _buffer_sizes(
    dimensions: list[tuple[int, int, bool]],
    inputs: int,
    outputs: int,
    element_bytes: int,
    accumulator_bytes: int,
    chip: GpuChip,
) -> tuple[int, ...]:
    reduced_strides = [stride for _, stride, is_reduced in dimensions if is_reduced]
    kept_strides = [stride for _, stride, is_reduced in dimensions if not is_reduced]
    # Whether the reduced values are contiguous in memory (`reduction_on_fastest_striding_dimension`).
    reduces_fastest_dim = not kept_strides or (bool(reduced_strides) and reduced_strides[0] < kept_strides[0])
    fastest = (reduced_strides[0] if reduced_strides else 0) if reduces_fastest_dim else kept_strides[0]
    first, second = (inputs, outputs) if reduces_fastest_dim else (outputs, inputs)
    vector = 1
    if fastest == element_bytes:
        if reduces_fastest_dim and first > 128 and len(dimensions) == 1:
            first //= VECTOR_WIDTH
        elif not reduces_fastest_dim:
            vector = _output_vector_width(dimensions, element_bytes)
            first //= vector
    width, height = _thread_block_shape(first, second, MAX_THREADS // vector)
    step_input, step_output = (width, 1) if reduces_fastest_dim else (1, width)
    values = -(-inputs // step_input)
    across_warps = values >= min(height * 16, MAX_VALUES_PER_THREAD)
    if across_warps:
        step_input *= height
    else:
        step_output *= height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    target = chip.multiprocessors * (chip.threads_per_multiprocessor // (width * height))
    if not across_warps or values < MAX_VALUES_PER_THREAD or grid > target:
        return ()
    most, least = -(-values // MIN_VALUES_PER_THREAD), -(-values // MAX_VALUES_PER_THREAD)
    blocks_per_output = max(min(-(-target // grid), most), least)
    if blocks_per_output <= 1:
        return ()
    buffer = accumulator_bytes * outputs * blocks_per_output * (1 if reduces_fastest_dim else width * vector)
    return buffer, 4 * grid


def _output_vector_width(dimensions: list[tuple[int, int, bool]], element_bytes: int) -> int:
    """Outputs that a thread computes at once: the largest power of two that divides all other strides and the number of
    outputs."""
    vector = VECTOR_WIDTH
    first = next(size for size, _, is_reduced in dimensions if not is_reduced)
    others = [stride for _, stride, is_reduced in dimensions if is_reduced or stride != element_bytes]
    while vector > 1 and (first % vector or any(stride // element_bytes % vector for stride in others)):
        vector //= 2
    return vector


def _thread_block_shape(first: int, second: int, max_threads: int) -> tuple[int, int]:
    """Width and height of a thread block (`set_block_dimension`)."""
    wide = _floor_power_of_two(first) if first < max_threads else max_threads
    high = _floor_power_of_two(second) if second < max_threads else max_threads
    width = min(wide, WARP_SIZE)
    height = min(high, max_threads // width)
    return min(wide, max_threads // height), height


def _floor_power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << max(number.bit_length() - 1, 0)
