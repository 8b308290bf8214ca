"""Loading experts of full size: 8-bit weights are never on the GPU in 16 bits, and the forecast of loading is what
torch's own allocator counts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from supertuner.config.settings.run_config import RunConfig
from supertuner.models.families.wan22.family import FAMILY as WAN_FAMILY
from supertuner.models.loading import copied_bytes
from supertuner.models.spec import ModelSource
from supertuner.plan.forecast.loading_memory import ExpertLoading
from supertuner.plan.trace.caching_allocator import simulate_allocator
from supertuner.plan.trace.cuda_kernels import CudaDevice
from supertuner.plan.trace.loading_phase import trace_loading
from supertuner.step.expert_setup import weight_dtype
from supertuner.step.precision import ComputePrecision
from tests.phantom import full_size
from tests.phantom.full_size import FLUX, GIB, QWEN, SDXL, WAN, Bytes, Case, chip, load_uninitialized
from tests.phantom.random_cases import BASE_FORMATS
from tests.plan.measured_loading import measured_peaks, write_pipelines

GPU = torch.device("cuda")
MODELS = {"qwen-image": QWEN, "wan2.2": WAN, "flux": FLUX, "sdxl": SDXL}


def modelled_and_measured(family_name: str, kind: str) -> tuple[Bytes, Bytes]:
    """Peaks of loading the first expert: of the forecast, and of torch's allocator."""
    case = Case("", family_name, MODELS[family_name], (3, 1024, 1024), model={"base_weights": kind})
    config, family, model, expert, _ = full_size._described(case)
    trace = trace_loading(config, family, model, expert, device=CudaDevice(chip=chip()))
    peaks = simulate_allocator(trace, windows=1)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = family.load_denoiser(model, expert, weight_dtype(config, ComputePrecision("bf16", GPU)))
    load_uninitialized(module, config, GPU)
    measured = Bytes(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return Bytes(peaks.allocated_bytes, peaks.reserved_bytes), measured


@pytest.mark.parametrize("kind", BASE_FORMATS)
@pytest.mark.parametrize("family", MODELS)
def test_the_forecast_of_loading_an_expert_holds(family: str, kind: str) -> None:
    modelled, measured = modelled_and_measured(family, kind)
    assert modelled.allocated == pytest.approx(measured.allocated, rel=0.001)
    assert modelled.reserved == pytest.approx(measured.reserved, rel=0.001)


def test_qwen_image_in_int8_loads_on_a_gpu_of_24_gib() -> None:
    """Its weights take 38 GiB in 16 bits."""
    program = "from tests.phantom import test_loading_forecast as t; t.print_peaks('qwen-image', 'int8')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "FAKECUDA_HBM": str(24 * GIB)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    modelled, measured, total = json.loads(done.stdout.splitlines()[-1])
    assert total == 24 * GIB
    assert modelled == pytest.approx(measured, rel=0.01) and measured < 20 * GIB


def print_peaks(family: str, kind: str) -> None:
    modelled, measured = modelled_and_measured(family, kind)
    _, total = torch.cuda.mem_get_info()
    sys.stdout.write(json.dumps([modelled.reserved, measured.reserved, total]) + "\n")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_host_memory_beside_the_gpu_is_what_is_forecast(tmp_path: Path, stored: torch.dtype) -> None:
    """From bf16 files one tensor at a time is in host memory, from fp32 files a copy of all in bf16 as well. Weights
    are zeros: the phantom's GPU memory is memory of the process, and zeros take none of it."""
    folder = write_pipelines(tmp_path, stored)
    model = WAN_FAMILY.read_model(ModelSource(str(folder)))
    trace = trace_loading(RunConfig(), WAN_FAMILY, model, model.experts[0], device=CudaDevice(chip=chip()))
    copied = copied_bytes(model.source, "transformer", torch.bfloat16)
    assert copied is not None
    one = ExpertLoading(trace, copied, to_host=False, adapter_bytes=0)
    (peaks,) = measured_peaks("cuda", ["as_computed"], folder)
    assert peaks["as_computed"] == pytest.approx(one.host_bytes_to_gpu, rel=0.1, abs=4 << 20)
