"""A cache of traces in files, keyed by everything that determines a trace: tracing the same step again is instant.

    <folder>/<key>.safetensors      arrays of one trace; its metadata has the format, the key, a checksum, and the rest

A file is checked when it is read. One with another format, another key or a wrong checksum counts as missing, and is
written again. Writes are atomic; if there are many files, the oldest are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from supertuner.core.durable import write_bytes
from supertuner.core.events import Progress, Sink, WarningEvent
from supertuner.core.types import JSON
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TraceSpan

FORMAT: Final = "supertuner trace 1"
TRACE_FOLDER: Final = ".traces"
"""Below `run.output_dir`."""
MAX_FILES: Final = 256
"""Files in a folder, of one or two megabytes each; the oldest are removed. A new version of a library makes all
obsolete."""
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "lycoris-lora", "torchao", "prodigyopt", "schedulefree")
PACKAGE: Final = Path(__file__).parents[2]
TRACED_PACKAGES: Final = ("models", "optim", "step", "plan")
TENSOR_COLUMNS: Final = ("nbytes", "birth", "death", "kind", "block")
"""Arrays with one entry per tensor."""


class TraceCache:
    """Traces in memory and in the files of a folder."""

    def __init__(self, folder: Path, versions: Mapping[str, str], sink: Sink, progress: Progress | None = None) -> None:
        """`versions`: of the programs that make the traces; traces of other versions are not used. `progress` gets a
        phase for each trace that is made, not for those that are read."""
        self._folder, self._versions, self._sink, self._progress = folder, dict(versions), sink, progress
        self._traces: dict[str, ExecutionTrace] = {}

    def get_or_create(
        self, description: Mapping[str, JSON], create: Callable[[], ExecutionTrace], title: str = "a step"
    ) -> ExecutionTrace:
        """The trace that `description` identifies: from memory, from its file, or made by `create`.

        If the folder cannot be written, a warning is emitted and the trace is returned all the same. `title` names the
        trace in the progress line.
        """
        key = self.key(description)
        if key not in self._traces:
            file = self._folder / f"{key}.safetensors"
            trace = read_trace(file, key)
            if trace is None:
                with nullcontext() if self._progress is None else self._progress.phase(f"tracing {title}"):
                    trace = create()
                self._write(file, serialize_trace(trace, key))
            self._traces[key] = trace
        return self._traces[key]

    def _write(self, file: Path, content: bytes) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, content)
            remove_oldest(file.parent, "*.safetensors")
        except OSError as error:
            self._sink.emit(WarningEvent("traces", f"{file} cannot be written ({error}); it is traced again next time"))

    def key(self, description: Mapping[str, JSON]) -> str:
        text = json.dumps({"format": FORMAT, "versions": self._versions, "what": description}, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())


def remove_oldest(folder: Path, pattern: str) -> None:
    """Removes the oldest files if there are more than `MAX_FILES`."""
    for old in sorted(folder.glob(pattern), key=_newest_first)[MAX_FILES:]:
        old.unlink(missing_ok=True)


def program_versions(packages: Sequence[str] = TRACED_PACKAGES) -> dict[str, str]:
    """Versions of everything whose code runs in a trace; for this program, a hash of the source files of `packages`."""
    sources = xxhash.xxh3_128()
    for file in package_source_files(packages):
        sources.update(file.relative_to(PACKAGE).as_posix().encode())
        sources.update(file.read_bytes())
    return {**{name: version(name) for name in LIBRARIES}, "supertuner": sources.hexdigest()}


def package_source_files(packages: Sequence[str] = TRACED_PACKAGES) -> list[Path]:
    """The source files of these packages; by default those whose code decides what a trace contains."""
    return [file for name in packages for file in sorted((PACKAGE / name).rglob("*.py"))]


def serialize_trace(trace: ExecutionTrace, key: str) -> bytes:
    """The content of a trace's file."""
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in TENSOR_COLUMNS}
    arrays["inputs"] = np.ascontiguousarray(trace.block_inputs)
    arrays["stretches"] = np.array(
        [(one.block, int(one.step_pass), one.begin, one.end, len(one.touched_tensors)) for one in trace.spans],
        dtype=np.int64,
    ).reshape(-1, 5)
    arrays["work"] = np.array([astuple(one.work) for one in trace.spans], dtype=np.float64).reshape(-1, 4)
    touched = [number for one in trace.spans for number in one.touched_tensors]
    arrays["touched"] = np.array(touched, dtype=np.int32)
    facts = {
        "phase": trace.phase,
        "device": trace.device,
        "granule": trace.alignment_bytes,
        "blocks": list(trace.blocks),
        "end": trace.end,
        "micro_batches": trace.micro_batches,
        "notes": list(trace.notes),
        "parts": [[name, *astuple(work)] for name, work in trace.work_by_part],
    }
    facts_json = json.dumps(facts)
    metadata = {"format": FORMAT, "key": key, "facts": facts_json, "checksum": _checksum(arrays, facts_json)}
    return save(arrays, metadata)


def read_trace(file: Path, key: str) -> ExecutionTrace | None:
    """The trace in a file; None: it is missing, damaged, or of another key."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="np") as tensors:
            metadata = tensors.metadata() or {}
            arrays = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # it is no dict
    except (SafetensorError, OSError):
        return None
    facts_json = metadata.get("facts", "")
    expected = {"format": FORMAT, "key": key, "checksum": _checksum(arrays, facts_json)}
    if any(metadata.get(name) != value for name, value in expected.items()):
        return None
    return _deserialize_trace(arrays, json.loads(facts_json))


def _deserialize_trace(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> ExecutionTrace:
    touched = iter(arrays["touched"].tolist())
    spans = []
    for row, figures in zip(arrays["stretches"].tolist(), arrays["work"].tolist(), strict=True):
        block, step_pass, begin, end, count = row
        work = OperatorWork(figures[0], figures[1], figures[2], int(figures[3]))
        spans.append(TraceSpan(block, StepPass(step_pass), begin, end, work, tuple(islice(touched, count))))
    return ExecutionTrace(
        phase=facts["phase"],
        device=facts["device"],
        alignment_bytes=facts["granule"],
        blocks=tuple(facts["blocks"]),
        **{name: arrays[name] for name in TENSOR_COLUMNS},
        spans=tuple(spans),
        end=facts["end"],
        block_inputs=arrays["inputs"],
        micro_batches=facts["micro_batches"],
        notes=tuple(facts["notes"]),
        work_by_part=tuple((name, OperatorWork(*work)) for name, *work in facts["parts"]),
    )


def _newest_first(file: Path) -> float:
    """Sort key: newest first. A file that another process has just removed counts as the oldest."""
    try:
        return -file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _checksum(arrays: Mapping[str, NDArray[Any]], facts_json: str) -> str:
    """The checksum of a stored trace: of every array's name, dtype, shape and values, and of the facts."""
    checksum = xxhash.xxh3_128(facts_json.encode())
    for name in sorted(arrays):
        checksum.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        checksum.update(np.ascontiguousarray(arrays[name]).data)
    return checksum.hexdigest()
