"""The forecast of loading weights: host memory as a real process takes it, and a phase of every estimate.

tests/phantom/test_loading_forecast.py compares memory of the GPU, and of the host beside it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import MIB
from supertuner.models.families.wan22.family import FAMILY as WAN
from supertuner.models.loading import copied_bytes
from supertuner.models.spec import ModelSource
from supertuner.plan.forecast.forecast import estimate_run
from supertuner.plan.forecast.loading_memory import LOADED_COPIES, UNKNOWN_FILES, ExpertLoading
from supertuner.plan.forecast.report import report_lines
from supertuner.plan.forecast.results import EstimateOptions, FitStatus, MachineCapacity, RunForecast, verdict_text
from supertuner.plan.forecast.storage import total_storage
from supertuner.plan.trace.cpu_kernels import CpuDevice
from supertuner.plan.trace.loading_phase import trace_loading
from tests.plan.making_forecasts import a_capacity
from tests.plan.measured_loading import measured_peaks, write_pipelines

KINDS = ("as_computed", "int8", "fp8")


def modelled(folder: Path, kind: str) -> ExpertLoading:
    config = RunConfig.model_validate({"model": {"base_weights": kind}})
    model = WAN.read_model(ModelSource(str(folder)))
    trace = trace_loading(config, WAN, model, model.experts[0], device=CpuDevice())
    copied = copied_bytes(model.source, model.experts[0].component, torch.bfloat16)
    assert copied is not None
    return ExpertLoading(trace, copied, to_host=False, adapter_bytes=0)


def test_a_process_that_loads_to_host_memory_takes_what_is_forecast(tmp_path: Path) -> None:
    """From bf16 files tensors stay mapped until they are placed; from fp32 files all are copied first."""
    folders = [write_pipelines(tmp_path / str(stored), stored) for stored in (torch.bfloat16, torch.float32)]
    measured = measured_peaks("cpu", KINDS, *folders)
    for folder, peaks in zip(folders, measured, strict=True):
        assert peaks == pytest.approx({kind: modelled(folder, kind).bytes_in_one_memory for kind in KINDS}, rel=0.1)
    mapped, copied = measured
    assert mapped["int8"] < 0.8 * mapped["as_computed"] < copied["int8"], "the cases must differ"


def test_bytes_that_loading_copies_follow_from_the_headers_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    tensors = {"a": torch.zeros(10, 3), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.zeros(5).int()}
    save_file(tensors, tmp_path / "transformer/diffusion_pytorch_model.safetensors")
    source = ModelSource(str(tmp_path))
    assert copied_bytes(source, "transformer", torch.bfloat16) == 30 * 2
    assert copied_bytes(source, "transformer", torch.float32) == 7 * 4
    assert copied_bytes(source, "transformer", torch.float16) == 37 * 2
    assert copied_bytes(source, "vae", torch.float32) is None
    single = replace(source, single_files={"transformer": tmp_path / "transformer/diffusion_pytorch_model.safetensors"})
    assert copied_bytes(single, "transformer", torch.bfloat16) == 7 * 4, "diffusers makes fp32 of a single file"


def estimated(folder: Path, capacity: MachineCapacity, **blocks: Any) -> RunForecast:
    data = {"id": "a", "instance_data_dir": "nowhere", "resolution": 64, "bucket_step": 16}
    config = RunConfig.model_validate(
        {
            "run": {"output_dir": str(folder / "output")},
            "model": {"family": "wan2.2", "path": "tiny"},
            "datasets": [data],
            **blocks,
        }
    )
    return estimate_run(config, capacity, EstimateOptions(samples=2, advise=False)).forecast


@pytest.fixture(scope="module")
def forecast(tmp_path_factory: pytest.TempPathFactory) -> RunForecast:
    """Two experts on a GPU, without a plan."""
    return estimated(tmp_path_factory.mktemp("estimate"), a_capacity("gh200-96"), plan={"act": "never"})


def test_loading_is_a_phase_of_every_estimate(forecast: RunForecast) -> None:
    phase = next(one for one in forecast.phases if one.name == "load")
    train = next(one for one in forecast.phases if one.name == "train low_noise")
    weights = train.gpu["frozen weights"]
    # The second expert is loaded beside the first one and its adapter.
    assert phase.gpu["frozen weights"] + phase.gpu["idle experts"] >= 2 * weights
    assert phase.host[LOADED_COPIES] == pytest.approx(weights, rel=0.2)
    assert UNKNOWN_FILES in phase.notes
    page = "\n".join(report_lines(forecast))
    assert "\n  load " in page and f"\n  {LOADED_COPIES} " in page and UNKNOWN_FILES in page
    written = json.loads(json.dumps(forecast.to_dict()))["phases"]
    assert [one["host"] for one in written if one["name"] == "load"] == [dict(phase.host)]


def test_the_verdict_names_loading_if_it_lacks_memory(forecast: RunForecast) -> None:
    """Host memory is large enough for everything else that is in it during loading and training."""
    phases = tuple(one for one in forecast.phases if one.name.startswith(("load", "train ")))
    needed = total_storage(forecast.stored, "memory")[0] + max(one.host_bytes for one in phases[1:])
    forecast = replace(forecast, phases=phases, capacity=replace(forecast.capacity, host_bytes=needed + 1024))
    verdict = forecast.verdict
    assert (verdict.phase, verdict.where, verdict.fit) == ("load", "host memory", FitStatus.DOES_NOT_FIT)
    assert "load needs" in verdict_text(forecast)


def test_an_expert_that_its_plan_keeps_in_host_memory_is_loaded_there(tmp_path: Path) -> None:
    forecast = estimated(tmp_path, a_capacity("gh200-96"), plan={"weights": "streamed"})
    assert all(phase.plan_estimate is not None for phase in forecast.phases if phase.name.startswith("train "))
    phase = next(one for one in forecast.phases if one.name == "load")
    assert phase.gpu_bytes == 0
    assert phase.host[LOADED_COPIES] > 0


def test_on_a_cpu_loading_counts_as_memory_of_the_run(tmp_path: Path) -> None:
    forecast = estimated(tmp_path, a_capacity("cpu", host_gib=16))
    phase = next(one for one in forecast.phases if one.name == "load")
    assert not phase.host and phase.reserved_bytes is None and 0 < phase.gpu_bytes < 64 * MIB
