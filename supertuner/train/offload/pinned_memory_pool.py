"""A pool of pinned host memory, which the GPU's copy engines can access: allocated piece by piece, reset all at once.

It is pinned in segments whose sizes are powers of two: torch rounds pinned allocations up to a power of two, so pinning
each piece separately would take up to twice its bytes.
"""

from __future__ import annotations

import torch

from supertuner.core.errors import TrainError
from supertuner.core.types import MIB, bytes_text

ALIGNMENT = 512
"""The alignment of torch's GPU allocations: kernels then choose the same code paths."""
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 16 * MIB, 1024 * MIB
PIECES_PER_SEGMENT = 4
"""Large pieces per segment: the unused rest at a segment's end is then a small share of it."""


class HostMemoryPool:
    """Allocates bytes in host memory; pinned for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._segments: list[torch.Tensor] = []
        self._used_bytes: list[int] = []
        """Used bytes of each segment, from its beginning."""

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, in use or not."""
        return sum(segment.nbytes for segment in self._segments)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Aligned, uninitialised bytes for exclusive use. TrainError if the host has too little memory."""
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for number, segment in enumerate(self._segments):
            if self._used_bytes[number] + rounded <= segment.nbytes:
                break
        else:
            number = len(self._segments)
            self._segments.append(self._new_segment(rounded))
            self._used_bytes.append(0)
        begin = self._used_bytes[number]
        self._used_bytes[number] += rounded
        return self._segments[number][begin : begin + nbytes]

    def reset(self) -> None:
        """Make all memory available again; pieces allocated before must not be used any more."""
        self._used_bytes = [0] * len(self._segments)

    def _new_segment(self, nbytes: int) -> torch.Tensor:
        limit_bytes = max(MAX_SEGMENT_BYTES, PIECES_PER_SEGMENT * nbytes)
        wanted_bytes = max(nbytes, min(max(MIN_SEGMENT_BYTES, self.nbytes), limit_bytes))
        size = 1 << (wanted_bytes - 1).bit_length()
        # Pinned memory begins at a page, so it needs no extra bytes to align; they would double its size.
        padding = 0 if self._pinned else ALIGNMENT
        try:
            segment = torch.empty(size + padding, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:  # from CUDA, which pins the memory, or from the host allocator
            memory, used = "pinned host memory" if self._pinned else "host memory", bytes_text(self.nbytes)
            problem = f"{bytes_text(size)} of {memory} cannot be allocated besides the {used} that the plan uses there"
            settings = 'plan.activations: "recompute", plan.weights: "gpu", plan.optimizer: "gpu"'
            remedy = f"free some, or keep more on the GPU: {settings}"
            raise TrainError(f"{problem}: {str(error).splitlines()[0]}; {remedy}") from error
        begin = -segment.data_ptr() % ALIGNMENT
        return segment[begin : begin + size]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, in place."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def tensor_in_bytes(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with dtype and shape of `like` in these bytes; dense, also if `like` has gaps between its rows."""
    begin = raw.storage_offset() // like.element_size()
    strides = torch.empty_like(like, device="meta").stride()
    tensor = torch.empty(0, dtype=like.dtype, device=raw.device)
    return tensor.set_(raw.untyped_storage(), begin, like.shape, strides)
