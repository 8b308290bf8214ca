"""Automagic's step on CPU tensors in C, if the extension was built: three passes over memory instead of forty.

It stores the same codes and signs as the torch implementation; weights and moments agree up to rounding. Which of the
two updates a tensor depends only on the tensor and the build, so a resumed run computes like an uninterrupted one.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from supertuner.optim.automagic.parameter_batches import ParameterBatch
from supertuner.optim.automagic.workspace import padded_count

POINTERS = ("gradient", "weights", "row", "column", "low", "high", "signs")
SCRATCH_POINTERS = ("row_factor", "column_factor", "sums", "new_signs")
SIZES = ("rows", "columns", "padded")
NUMBERS = ("share", "epsilon", "clip", "factor", "decay", "lowest", "highest", "offset")
CODES = ("top", "split", "bump")


class NativeStep(ctypes.Structure):
    """`struct step` of _automagic.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS + SCRATCH_POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_float) for name in NUMBERS),
        *((name, ctypes.c_int32) for name in (*CODES, "first")),
    )


@dataclass(frozen=True, slots=True)
class NativeStepConstants:
    """The constants of a step, named as in `struct step`. Rates, `factor` and `decay` are in units of the rates."""

    share: float
    epsilon: float
    clip: float
    factor: float
    decay: float
    lowest: float
    highest: float
    offset: float
    top: int
    split: int
    bump: int


def find_native_library() -> Path | None:
    """The path of the extension, or None if it was not built when the package was installed."""
    candidates = (Path(__file__).with_name(f"_automagic{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


class NativeAutomagic:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self._step_function = ctypes.CDLL(str(path)).supertuner_automagic
        self._step_function.argtypes, self._step_function.restype = [ctypes.POINTER(NativeStep)], None

    def supports(self, batch: ParameterBatch) -> bool:
        """Whether all parameters are contiguous fp32 tensors on the CPU.

        Fake tensors have no memory; a forecast of a GPU step uses the torch implementation, as the GPU does.
        """
        return all(
            p.device.type == "cpu" and p.dtype == torch.float32 and p.is_contiguous() and not isinstance(p, FakeTensor)
            for p in batch.parameters
        )

    def step(self, batches: list[ParameterBatch], constants: NativeStepConstants, fresh: set[int]) -> None:
        """One step of all parameters of these batches, on as many threads as torch uses.

        `fresh` holds the ids of parameters whose first step this is.
        """
        jobs = [(batch, row) for batch in batches for row in range(len(batch.parameters))]
        threads = min(torch.get_num_threads(), len(jobs))
        if threads <= 1:
            for batch, row in jobs:
                self._step_one(batch, row, constants, fresh)
            return
        with ThreadPoolExecutor(threads) as pool:  # ctypes releases the GIL during the call
            list(pool.map(lambda job: self._step_one(job[0], job[1], constants, fresh), jobs))

    def _step_one(self, batch: ParameterBatch, row: int, constants: NativeStepConstants, fresh: set[int]) -> None:
        p, (rows, columns) = batch.parameters[row], batch.shape
        assert p.grad is not None
        gradient = p.grad.to(torch.float32).contiguous()
        state_rows = {name: batch.state[name][row] for name in POINTERS[2:]}
        padded_size = padded_count(batch.count)
        scratch = torch.empty(rows + 3 * columns + (padded_size // 8 + 3) // 4, dtype=torch.float32)
        offsets = (0, rows, rows + columns, rows + 3 * columns)
        step = NativeStep(
            gradient=gradient.data_ptr(),
            weights=p.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in state_rows.items()},
            **{name: scratch.data_ptr() + 4 * begin for name, begin in zip(SCRATCH_POINTERS, offsets, strict=True)},
            rows=rows,
            columns=columns,
            padded=padded_size,
            **{name: getattr(constants, name) for name in NUMBERS + CODES},
            first=id(p) in fresh,
        )
        self._step_function(ctypes.byref(step))
