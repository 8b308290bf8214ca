"""nvidia-smi beside what is measured: GPUs second by second, as it prints them, in a file; absent where it is not."""

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
    """Log to `file` as long as it is open. Gives a note where there is nothing to log, and None where there is."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if program is None:
        yield "no nvidia-smi here: GPUs were not watched from outside"
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
    """The highest of each column that is a number, by GPU; what the program said where it gave no table."""
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    if not lines:
        return ["nvidia-smi said nothing"]
    heads = [head.strip() for head in lines[0].split(",")]
    if "index" not in heads or len(lines) < 2:
        return [f"nvidia-smi said: {lines[0]}"]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines[1:]]
    complete_rows = [dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads)]
    summaries = []
    for gpu in sorted({row["index"] for row in complete_rows}):
        gpu_rows = [row for row in complete_rows if row["index"] == gpu]
        maxima = [
            text for head in heads if (text := _column_maximum(head, [row[head] for row in gpu_rows])) is not None
        ]
        summaries.append(
            f"GPU {gpu} ({gpu_rows[0].get('name', 'unnamed')}), {len(gpu_rows)} looks, at most: {', '.join(maxima)}"
        )
    return summaries


def _column_maximum(head: str, cells: list[str]) -> str | None:
    """`memory.used 91,234 MiB`; None for what is no amount."""
    name, bracket, unit = head.partition(" [")
    numbers = [float(word) for cell in cells if (word := cell.split(" ")[0]).replace(".", "", 1).isdecimal()]
    if not bracket or not numbers:
        return None
    return f"{name} {max(numbers):,.0f} {unit.rstrip(']')}"
