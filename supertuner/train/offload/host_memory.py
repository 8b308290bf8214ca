"""Host memory that a GPU copies from and to without the CPU: taken piece by piece, given back all at once.

Pinned in segments whose size is a power of two: torch rounds pinned memory up to one, and a piece each would cost up
to twice its bytes.
"""

from __future__ import annotations

import torch

from supertuner.core.errors import TrainError
from supertuner.core.types import MIB, bytes_text

ALIGNMENT = 512
"""As torch aligns what it allocates on a GPU: a tensor is read as fast, and by the same code, from here."""
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 16 * MIB, 1024 * MIB
PIECES_PER_SEGMENT = 4
"""Large pieces that a segment is to hold: the rest at its end, too small for another, is a small part of it then."""


class HostMemoryPool:
    """Bytes for tensors at home. Contents of what was given back are worthless."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._segments: list[torch.Tensor] = []
        self._used_bytes: list[int] = []
        """Of each segment, from its beginning."""
        self.allocated_bytes = 0
        """Bytes in use, each piece rounded up."""

    @property
    def nbytes(self) -> int:
        """What is held, in use or not."""
        return sum(segment.nbytes for segment in self._segments)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """So many bytes that nobody else has, aligned."""
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
        self.allocated_bytes += rounded
        return self._segments[number][begin : begin + nbytes]

    def reset(self) -> None:
        self._used_bytes = [0] * len(self._segments)
        self.allocated_bytes = 0

    def _new_segment(self, nbytes: int) -> torch.Tensor:
        wanted_bytes = max(
            nbytes, min(max(MIN_SEGMENT_BYTES, self.nbytes), max(MAX_SEGMENT_BYTES, PIECES_PER_SEGMENT * nbytes))
        )
        size = 1 << (wanted_bytes - 1).bit_length()
        # Pinned memory begins at a page, and anything beside a power of two would double it.
        try:
            segment = torch.empty(
                size if self._pinned else size + ALIGNMENT, dtype=torch.uint8, pin_memory=self._pinned
            )
        except RuntimeError as error:  # of CUDA, which pins it, or of the host's allocator
            memory_kind = "pinned host memory" if self._pinned else "host memory"
            raise TrainError(
                f"{bytes_text(size)} of {memory_kind} cannot be had beside the {bytes_text(self.nbytes)} that the plan has "
                f"there: {str(error).splitlines()[0]}; free some, or keep "
                'more on the GPU: plan.activations: "recompute", plan.weights: "gpu", plan.optimizer: "gpu"'
            ) from error
        begin = -segment.data_ptr() % ALIGNMENT
        return segment[begin : begin + size]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, in place."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def tensor_in_bytes(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the form of `like` in these bytes; one whose rows lie apart is put together."""
    begin = raw.storage_offset() // like.element_size()
    strides = torch.empty_like(like, device="meta").stride()
    tensor = torch.empty(0, dtype=like.dtype, device=raw.device)
    return tensor.set_(raw.untyped_storage(), begin, like.shape, strides)
