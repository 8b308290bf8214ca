"""A torch without CUDA beside an NVIDIA driver: training says so instead of using the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from supertuner.core.errors import TrainError
from supertuner.core.host import HostFacts
from supertuner.train.run_checks import select_device

pytestmark = pytest.mark.requires(torch.version.cuda is None, reason="this torch is a CUDA build")


def test_auto_does_not_fall_back_to_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06")
    with pytest.raises(TrainError, match=r"is a CPU build.*TORCH=cuda.*train.device"):
        select_device("auto", host=HostFacts(tmp_path))
    assert select_device("cpu", host=HostFacts(tmp_path)).type == "cpu"
    assert select_device("auto", host=HostFacts(tmp_path / "without")).type == "cpu"
