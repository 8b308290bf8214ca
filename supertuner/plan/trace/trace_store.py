"""Traces kept in files, by a key of everything that decides them: a second look at the same step is instant.

    <folder>/<key>.safetensors      arrays of one trace; its metadata has the format, the key, a checksum, and the rest

What is opened is checked: another format, another key, a checksum or an array that does not fit make it as if nothing
was there, and it is written anew. A file appears whole or not at all; of many, the oldest are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from supertuner.core.durable import write_bytes
from supertuner.core.events import Progress, Sink, Warned
from supertuner.core.types import JSON
from supertuner.plan.placement.step_table import Work
from supertuner.plan.trace.record import Pass, Stretch, Trace

FORMAT: Final = "supertuner trace 1"
MOST: Final = 256
"""Files in a folder, of a megabyte or two each; the oldest go. A new version of a library leaves all of them behind."""
LIBRARIES: Final = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "lycoris-lora",
    "torchao",
    "prodigyopt",
    "schedulefree",
)
COLUMNS: Final[Mapping[str, Any]] = {
    "nbytes": np.int64,
    "birth": np.int64,
    "death": np.int64,
    "kind": np.uint8,
    "block": np.int16,
}
"""One entry for every tensor."""


class Kept:
    """Traces below a folder, or nowhere."""

    def __init__(
        self, folder: Path | None, versions: Mapping[str, str], sink: Sink, progress: Progress | None = None
    ) -> None:
        """`versions`: of the programs that made them; a trace of another one is not found. Progress is told of what is
        made, not of what is found."""
        self._folder, self._versions, self._sink, self._progress = folder, dict(versions), sink, progress
        self._seen: dict[str, Trace] = {}

    def trace(self, what: Mapping[str, JSON], make: Callable[[], Trace], title: str = "a step") -> Trace:
        """The trace that `what` describes completely: seen before, kept from earlier or made now. A folder that cannot
        be written costs time, not the trace."""
        key = self.key(what)
        if key not in self._seen:
            file = None if self._folder is None else self._folder / f"{key}.safetensors"
            found = None if file is None else read(file, key)
            if found is None:
                with nullcontext() if self._progress is None else self._progress.phase(f"tracing {title}"):
                    found = make()
                if file is not None:
                    self._write(file, packed(found, key))
            self._seen[key] = found
        return self._seen[key]

    def _write(self, file: Path, content: bytes) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, content)
            for old in sorted(file.parent.glob("*.safetensors"), key=_age)[MOST:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self._sink.emit(Warned("traces", f"{file} cannot be written ({error}); it is made anew next time"))

    def key(self, what: Mapping[str, JSON]) -> str:
        text = json.dumps({"format": FORMAT, "versions": self._versions, "what": what}, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())


def versions() -> dict[str, str]:
    """Of everything whose code runs in a trace; of our own, its content."""
    found = {name: version(name) for name in LIBRARIES}
    sources = xxhash.xxh3_128()
    package = Path(__file__).parents[1]
    for room in ("models", "optim", "step", "plan"):
        for file in sorted((package / room).rglob("*.py")):
            sources.update(file.relative_to(package).as_posix().encode())
            sources.update(file.read_bytes())
    return {**found, "supertuner": sources.hexdigest()}


def packed(trace: Trace, key: str) -> bytes:
    """The bytes of a file."""
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in COLUMNS}
    arrays["inputs"] = np.ascontiguousarray(trace.inputs)
    arrays["stretches"] = np.array(
        [(one.block, int(one.during), one.begin, one.end, len(one.touched)) for one in trace.stretches], dtype=np.int64
    ).reshape(-1, 5)
    arrays["work"] = np.array([tuple(asdict(one.work).values()) for one in trace.stretches], dtype=np.float64).reshape(
        -1, 4
    )
    touched = [number for one in trace.stretches for number in one.touched]
    arrays["touched"] = np.array(touched, dtype=np.int32)
    facts = {
        "phase": trace.phase,
        "device": trace.device,
        "granule": trace.granule,
        "blocks": list(trace.blocks),
        "end": trace.end,
        "micro_batches": trace.micro_batches,
        "notes": list(trace.notes),
        "parts": [[name, *asdict(work).values()] for name, work in trace.parts],
    }
    told = json.dumps(facts)
    metadata = {"format": FORMAT, "key": key, "facts": told, "checksum": _checksum(arrays, told)}
    return save(arrays, metadata)


def read(file: Path, key: str) -> Trace | None:
    """The trace in a file; None: there is none that is whole and of this key."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="np") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    except (SafetensorError, OSError):
        return None
    told = metadata.get("facts", "")
    if (
        metadata.get("format") != FORMAT
        or metadata.get("key") != key
        or metadata.get("checksum") != _checksum(arrays, told)
    ):
        return None
    return _unpacked(arrays, json.loads(told))


def _unpacked(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> Trace:
    ends = np.cumsum(arrays["stretches"][:, 4]).tolist()
    touched = arrays["touched"].tolist()
    stretches = []
    for row, work, begin, end in zip(
        arrays["stretches"].tolist(), arrays["work"].tolist(), [0, *ends[:-1]], ends, strict=True
    ):
        done = Work(work[0], work[1], work[2], int(work[3]))
        stretches.append(Stretch(row[0], Pass(row[1]), row[2], row[3], done, tuple(touched[begin:end])))
    return Trace(
        phase=facts["phase"],
        device=facts["device"],
        granule=facts["granule"],
        blocks=tuple(facts["blocks"]),
        **{name: arrays[name] for name in COLUMNS},
        stretches=tuple(stretches),
        end=facts["end"],
        inputs=arrays["inputs"],
        micro_batches=facts["micro_batches"],
        notes=tuple(facts["notes"]),
        parts=tuple((name, Work(*work)) for name, *work in facts["parts"]),
    )


def _age(file: Path) -> float:
    """Newest first; one that somebody else has just removed is older than any."""
    try:
        return -file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _checksum(arrays: Mapping[str, NDArray[Any]], told: str) -> str:
    """Of every value, shape and name; what has this checksum is what was written."""
    sum_ = xxhash.xxh3_128(told.encode())
    for name in sorted(arrays):
        sum_.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        sum_.update(np.ascontiguousarray(arrays[name]).data)
    return sum_.hexdigest()
