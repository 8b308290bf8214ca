"""Tracing Wan2.2 14B with 81 frames of 720p at full size: seconds and memory of each phase, and of a cached trace; and
`supertuner estimate` of the 260-picture example, with an empty folder of traces and again."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from benchmarks.harness import ClaimRow, at_most, report, say

NAME = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
MEDIA = (3, 81, 720, 1280)
PHASE_S, RSS_GB, AGAIN_S = 60.0, 1.5, 0.5
ESTIMATE = ["estimate", "examples/wan22_lycoris_pictures.yaml", "--samples", "260", "--machine", "gh200-96"]
COLD_S, WARM_S = 30.0, 2.0
"""Goals of `supertuner estimate`, in CPU seconds of the process."""


def measured() -> dict[str, float]:
    """Phase → CPU seconds; `rss_gb`: peak memory of this process; `again_s`: the longest read of a cached trace."""
    from supertuner.config.settings.run_config import RunConfig
    from supertuner.core.events import NullSink
    from supertuner.models.published_models import describe_model
    from supertuner.plan.trace.cached_traces import CachedTraces
    from supertuner.plan.trace.cuda_kernels import CudaDevice
    from supertuner.plan.trace.encoder_shapes import EncoderShapeProbe
    from supertuner.plan.trace.trace_store import TraceCache, program_versions

    config = RunConfig.model_validate({"model": {"family": "wan2.2", "path": NAME}})
    family, model, _ = describe_model(config.model)
    shape = EncoderShapeProbe(config, family, model).batch_shape(1, MEDIA)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = TraceCache(Path(folder), program_versions(), NullSink())
        traces = CachedTraces(cache, config, family, model, CudaDevice())
        expert = model.experts[0]
        phases: dict[str, Callable[[], object]] = {
            "encode media": lambda: traces.media(MEDIA),
            "encode text": traces.text,
            "train, all kept": lambda: traces.training(expert, shape, checkpointing=False),
            "train, all recomputed": lambda: traces.training(expert, shape, checkpointing=True),
            "sample": lambda: traces.sampling(shape),
        }
        for name, phase in phases.items():
            begin = time.process_time()
            phase()
            found[name] = time.process_time() - begin
        found["rss_gb"] = getrusage(RUSAGE_SELF).ru_maxrss / 1e6
        again = []
        for phase in phases.values():
            begin = time.process_time()
            phase()
            again.append(time.process_time() - begin)
        found["again_s"] = max(again)
    return found


def estimate_cpu_s(folder: str) -> float:
    """CPU seconds of the command, with the traces and forecasts in a folder."""
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "supertuner", *ESTIMATE, "--set", f"run.output_dir={folder}"]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def estimate_rows() -> list[ClaimRow]:
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = estimate_cpu_s(folder), estimate_cpu_s(folder)
    say(f"estimate {cold:.2f}, again {warm:.2f}")
    note = "260 pictures, Wan2.2 14B, LoKr; CPU time of the command"
    return [
        at_most("estimate: no traces", cold, COLD_S, unit="s", note=note),
        at_most("estimate: the same again", warm, WARM_S, unit="s", note=note),
    ]


def rows() -> list[ClaimRow]:
    code = "import json; from benchmarks.bench_trace import measured; print(json.dumps(measured()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    say(", ".join(f"{name} {figure:.2f}" for name, figure in found.items()))
    rss, again = found.pop("rss_gb"), found.pop("again_s")
    note = "Wan2.2 14B, 81 frames, 720p; CPU time"
    made = [at_most(f"trace: {name}", figure, PHASE_S, unit="s", note=note) for name, figure in found.items()]
    made.append(at_most("trace: memory of the process", rss, RSS_GB, unit="GB"))
    made.append(at_most("trace: read from the cache", again, AGAIN_S, unit="s", note="the slowest phase"))
    return [*made, *estimate_rows()]


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    sys.exit(main())
