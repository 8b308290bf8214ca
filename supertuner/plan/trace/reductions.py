"""What a reduction (sum, mean, norm) takes on CUDA while it runs, where several thread blocks share an output. Pure.

The arithmetic of PyTorch 2.13's `ATen/native/cuda/Reduce.cuh` (`setReduceConfig`, `global_memory_size`) on the strides
that its TensorIterator makes. A bias's gradient is such a sum over all tokens, and its buffer can be larger than the
gradient of the layer's output. Compared with torch's CUDA build on the phantom: tests/phantom/test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_THREADS = 512
WARP = 32
MIN_VALUES = 16
MAX_VALUES = 256
VECTOR = 4
INDEXED_BYTES = 2**31 - 1
"""A tensor of more is reduced in pieces."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What of a GPU decides how work is divided."""

    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int


GH200 = Chip((9, 0), 132, 2048)
"""And H100. Other chips of NVIDIA's choose other kernels and divide work otherwise, which changes a peak by less than a
per cent (docs/forecast.md); a forecast for any of them is made with these."""


def reduction_bytes(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
    element_bytes: int,
    chip: Chip,
    *,
    sum_bytes: int = 4,
) -> tuple[int, ...]:
    """Bytes of the buffer for sums of parts and of its semaphores; nothing where a block does an output alone.

    `strides` count elements; `sum_bytes` is the size of what is summed in: fp32 for half formats and fp32 itself.
    """
    gone = {dimension % len(shape) for dimension in reduced} if shape else set()
    sizes = [
        (size, stride * element_bytes, index in gone)
        for index, (size, stride) in enumerate(zip(shape, strides, strict=True))
    ]
    dimensions = _coalesced([one for one in sizes if one[0] != 1])
    dimensions = _in_range(dimensions)
    inputs = outputs = 1
    for size, _, away in dimensions:
        inputs, outputs = (inputs * size, outputs) if away else (inputs, outputs * size)
    if inputs * outputs == 0:
        return ()
    return _buffers(dimensions, inputs, outputs, element_bytes, sum_bytes, chip)


def _coalesced(dimensions: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """The iterator's order: reduced ones first, within both kinds the smallest stride first; neighbours are joined."""
    ordered = sorted(dimensions, key=lambda one: (not one[2], one[1]))
    joined: list[tuple[int, int, bool]] = []
    for size, stride, away in ordered:
        if joined and joined[-1][2] == away and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1], away)
        else:
            joined.append((size, stride, away))
    return joined


def _in_range(dimensions: list[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """The larger half, as often as needed until 32 bits address it: pieces are reduced one after the other."""
    while sum((size - 1) * stride for size, stride, _ in dimensions) >= INDEXED_BYTES:
        widest = max(range(len(dimensions)), key=lambda index: (dimensions[index][0] - 1) * dimensions[index][1])
        size, stride, away = dimensions[widest]
        dimensions = [*dimensions[:widest], (size - size // 2, stride, away), *dimensions[widest + 1 :]]
    return dimensions


def _buffers(
    dimensions: list[tuple[int, int, bool]], inputs: int, outputs: int, element_bytes: int, sum_bytes: int, chip: Chip
) -> tuple[int, ...]:
    away = [stride for _, stride, gone in dimensions if gone]
    stay = [stride for _, stride, gone in dimensions if not gone]
    along = not stay or (bool(away) and away[0] < stay[0])
    """Whether what is summed lies side by side."""
    fastest = (away[0] if away else 0) if along else stay[0]
    first, second = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    if fastest == element_bytes:
        if along and first > 128 and len(dimensions) == 1:
            first //= VECTOR
        elif not along:
            vector = _output_vector(dimensions, element_bytes)
            first //= vector
    width, height = _block(first, second, MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along else (1, width)
    values = -(-inputs // step_input)
    across_warps = values >= min(height * 16, MAX_VALUES)
    if across_warps:
        step_input *= height
    else:
        step_output *= height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    target = chip.multiprocessors * (chip.threads_per_multiprocessor // (width * height))
    if not across_warps or values < MAX_VALUES or grid > target:
        return ()
    shared_by = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if shared_by <= 1:
        return ()
    buffer = sum_bytes * outputs * shared_by * (1 if along else width * vector)
    return buffer, 4 * grid


def _output_vector(dimensions: list[tuple[int, int, bool]], element_bytes: int) -> int:
    """How many outputs a thread takes at once: as many as every other stride and the number of outputs allow."""
    vector = VECTOR
    first = next(size for size, _, away in dimensions if not away)
    others = [stride for _, stride, away in dimensions if away or stride != element_bytes]
    while vector > 1 and (first % vector or any(stride // element_bytes % vector for stride in others)):
        vector //= 2
    return vector


def _block(first: int, second: int, most: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    wide = _power(first) if first < most else most
    high = _power(second) if second < most else most
    width = min(wide, WARP)
    height = min(high, most // width)
    return min(wide, most // height), height


def _power(number: int) -> int:
    """The largest power of two that is not above the number."""
    return 1 << max(number.bit_length() - 1, 0)
