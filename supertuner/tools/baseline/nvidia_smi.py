"""Runs nvidia-smi during a measurement and logs every GPU once per second, if nvidia-smi is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOG_FILE: Final = "nvidia_smi.log"
INTERVAL_MS: Final = 1000
QUERY_FIELDS: Final = (
    "timestamp,index,name,memory.used,memory.total,utilization.gpu,utilization.memory,power.draw,"
    "clocks.sm,clocks.mem,temperature.gpu,clocks_throttle_reasons.active"
)
TERMINATE_TIMEOUT_S: Final = 5.0


@contextmanager
def log_gpus(file: Path, environ: Mapping[str, str]) -> Iterator[str | None]:
    """Log to `file` inside the context. Yields None, or a note if nvidia-smi is not installed."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if program is None:
        yield "nvidia-smi is not installed: GPUs were not logged"
        return
    command = [program, f"--query-gpu={QUERY_FIELDS}", "--format=csv", f"--loop-ms={INTERVAL_MS}"]
    with file.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environ), process_group=0
        )
    try:
        yield None
    finally:
        process.terminate()
        try:
            process.wait(TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summarize_log(file: Path) -> list[str]:
    """The maximum of each numeric column, by GPU; the first line of the output if it is not a table."""
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    if not lines:
        return ["nvidia-smi printed nothing"]
    heads = [head.strip() for head in lines[0].split(",")]
    if "index" not in heads or len(lines) < 2:
        return [f"nvidia-smi printed: {lines[0]}"]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines[1:]]
    complete_rows = [dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads)]
    summaries = []
    for gpu in sorted({row["index"] for row in complete_rows}):
        gpu_rows = [row for row in complete_rows if row["index"] == gpu]
        columns = (_column_maximum(head, [row[head] for row in gpu_rows]) for head in heads)
        maxima = ", ".join(text for text in columns if text is not None)
        name = gpu_rows[0].get("name", "unnamed")
        summaries.append(f"GPU {gpu} ({name}), {len(gpu_rows)} samples, maxima: {maxima}")
    return summaries


def _column_maximum(head: str, cells: list[str]) -> str | None:
    """`memory.used 91,234 MiB`; None for a column without a unit or without numbers."""
    name, bracket, unit = head.partition(" [")
    numbers = [float(word) for cell in cells if (word := cell.split(" ")[0]).replace(".", "", 1).isdecimal()]
    if not bracket or not numbers:
        return None
    return f"{name} {max(numbers):,.0f} {unit.rstrip(']')}"
