"""The doctor's checks find each misconfiguration only where it is one, and each remedy names a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from supertuner.core.errors import OptionError
from supertuner.core.types import GIB, KIB, MIB
from supertuner.memory.driver import NotAvailable
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus
from supertuner.tools.doctor.requirements import (
    REQUIREMENTS,
    DoctorFindings,
    all_checks,
    parse_requirements,
    unmet_requirements,
)
from supertuner.tools.doctor.screen import (
    PLAIN_SIGNS,
    can_encode_signs,
    check_lines,
    render_lines,
    summary,
    to_ascii,
    visible_checks,
)
from supertuner.tools.doctor.system_snapshot import SystemSnapshot, figure_origin
from supertuner.tools.doctor.torch_probe import TorchProbeResult, parse_answer, probe_torch
from tests.memory.machine_files import GB10, GH200, H100, auxv, folder_host, in_gib, meminfo
from tests.tools.doctor.snapshots import CPU_TORCH, STOCK, check, complaints, gh200_snapshot, snapshot_without_gpu


def examined(found: SystemSnapshot) -> DoctorFindings:
    return DoctorFindings(found, all_checks(found), AllocationTestSkipped("not run in this test"))


def test_a_well_configured_gh200_gets_no_complaint(tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path, environ={"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1"})
    assert complaints(found) == {}
    assert check(found, "machine").finding.startswith("GH200 96 GB (gh200-96), NVLink-C2C; aarch64")
    assert check(found, "hints").status is CheckStatus.GOOD


MISCONFIGURATIONS: Mapping[str, tuple[dict[str, str | bytes], dict[str, str], str]] = {
    "page size": ({"proc/self/auxv": auxv(4 * KIB)}, {}, "linux-nvidia-64k"),
    "NUMA balancing": ({"proc/sys/kernel/numa_balancing": "1\n"}, {}, "sysctl -w kernel.numa_balancing=0"),
    "huge pages": ({"sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n"}, {}, "madvise"),
    "swap": (
        {"proc/meminfo": meminfo(MemTotal=in_gib(574), MemAvailable=in_gib(500), SwapTotal=1 << 20, SwapFree=1 << 19)},
        {},
        "swapoff",
    ),
    "allocator settings": ({}, {"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True,uvm_access_pattern:gpu_first"}, "unset"),
    "memory fraction": ({}, {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.8"}, "unset PYTORCH_ALLOC_CONF"),
    "pattern variable": ({}, {"GH200_UVM_ACCESS_PATTERN": "fast"}, "unset GH200_UVM_ACCESS_PATTERN"),
    "ratio variable": ({}, {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "0.5"}, "unset GH200_UVM_OVERSUBSCRIPTION_RATIO"),
    "SUPERTUNER_…": ({}, {"SUPERTUNER_TRAIN__BATCHSIZE": "3"}, "config show"),
    "memory limit": (
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(100 * GIB),
            "sys/fs/cgroup/job/memory.current": str(10 * GIB),
        },
        {},
        "--mem=",
    ),
}


@pytest.mark.parametrize("name", MISCONFIGURATIONS)
def test_a_misconfiguration_is_found_with_the_command_that_corrects_it(name: str, tmp_path: Path) -> None:
    files, environ, command = MISCONFIGURATIONS[name]
    found = complaints(gh200_snapshot(tmp_path, files=files, environ=environ))
    assert list(found) == [name]
    assert command in found[name].remedy


def test_little_memory_is_a_warning_and_almost_none_is_bad(tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path)
    little = replace(found, resources=replace(found.resources, host_available=100 * GIB))
    none = replace(found, resources=replace(found.resources, host_available=9 * GIB))
    assert check(little, "memory").status is CheckStatus.WARNING and "arena ls" in check(little, "memory").remedy
    assert check(none, "memory").status is CheckStatus.BAD


def test_a_small_dev_shm_few_open_files_and_a_full_disk_are_found(tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path)
    poor = replace(
        found.resources, shm_bytes=64 * MIB, shm_free=64 * MIB, open_files=1024, folder_free=GIB, compiler=None
    )
    assert set(complaints(replace(found, resources=poor))) == {"/dev/shm", "open files", "disk", "compiler"}
    gone = replace(found, resources=replace(found.resources, shm_bytes=None, shm_free=None))
    assert check(gone, "/dev/shm").status is CheckStatus.BAD


def test_a_driver_before_cuda_13_has_no_batch_calls(tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path, version=12080, torch=replace(STOCK, cuda="12.8"))
    assert list(complaints(found)) == ["driver"]
    assert "CUDA 12.8" in check(found, "driver").finding and "580" in check(found, "driver").remedy


@pytest.mark.parametrize(
    ("torch", "part"),
    [
        (CPU_TORCH, "a build without CUDA"),
        (replace(STOCK, sees=0), "sees no GPU, although the driver lists one"),
        (replace(STOCK, cuda="14.0", sees=0), "newer than the driver"),
        (TorchProbeResult(problem="ImportError: libcudart.so.13: no such file"), "libcudart.so.13"),
        (TorchProbeResult(version="2.13.0+rocm6.4", hip="6.4"), "ROCm"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_found(torch: TorchProbeResult, part: str, tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path, torch=torch)
    assert list(complaints(found)) == ["torch"]
    assert check(found, "torch").status is CheckStatus.BAD and part in check(found, "torch").finding


def test_the_keys_of_a_patched_torch_are_accepted_with_a_patched_torch(tmp_path: Path) -> None:
    found = gh200_snapshot(
        tmp_path, torch=replace(STOCK, patched=True), environ={"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"}
    )
    assert list(complaints(found)) == ["patches"]
    assert check(found, "allocator settings").status is CheckStatus.GOOD


def test_the_keys_of_a_patched_torch_are_bad_with_a_stock_one_and_a_warning_without_cuda(tmp_path: Path) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,use_uvm:True"}
    stock = check(gh200_snapshot(tmp_path / "a", environ=environ), "allocator settings")
    assert stock.status is CheckStatus.BAD and "PYTORCH_CUDA_ALLOC_CONF contains use_uvm" in stock.finding
    without = check(gh200_snapshot(tmp_path / "b", environ=environ, torch=CPU_TORCH), "allocator settings")
    assert without.status is CheckStatus.WARNING
    typo = {"PYTORCH_ALLOC_CONF": "use_uvm:True,uvm_acess_pattern:gpu_first"}
    result = check(gh200_snapshot(tmp_path / "c", environ=typo, torch=CPU_TORCH), "allocator settings")
    assert result.status is CheckStatus.BAD and "did you mean uvm_access_pattern?" in result.finding


def test_allocator_settings_of_stock_torch_are_good(tmp_path: Path) -> None:
    text = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"
    assert (
        check(gh200_snapshot(tmp_path, environ={"PYTORCH_CUDA_ALLOC_CONF": text}), "allocator settings").status
        is CheckStatus.GOOD
    )


def test_small_pages_and_numa_balancing_are_harmless_without_grace(tmp_path: Path) -> None:
    files = {"proc/self/auxv": auxv(4 * KIB), "proc/sys/kernel/numa_balancing": "1\n"}
    assert complaints(gh200_snapshot(tmp_path / "pcie", H100, files=files)) == {}
    assert complaints(gh200_snapshot(tmp_path / "pool", GB10, files=files)) == {}


def test_a_gh200_without_ats_is_bad_and_a_pcie_card_is_not(tmp_path: Path) -> None:
    without_ats = replace(GH200, host_page_tables=False, pageable=False)
    assert check(gh200_snapshot(tmp_path / "a", without_ats), "ATS").status is CheckStatus.BAD
    assert check(gh200_snapshot(tmp_path / "b", H100), "ATS").status is CheckStatus.ABSENT


def test_a_gpu_without_managed_memory_or_concurrent_access_is_found(tmp_path: Path) -> None:
    none = replace(H100, managed=False, concurrent_managed=False)
    assert set(complaints(gh200_snapshot(tmp_path, none))) == {"managed memory", "concurrent access"}


def test_a_property_that_the_driver_does_not_report_is_neither_good_nor_bad(tmp_path: Path) -> None:
    silent = replace(
        H100, managed=None, concurrent_managed=None, host_page_tables=None, direct_host_access=None, integrated=None
    )
    found = gh200_snapshot(tmp_path, silent)
    for name in ("managed memory", "concurrent access", "ATS", "direct access"):
        assert check(found, name).status is CheckStatus.ABSENT and "not reported" in check(found, name).finding


def test_a_machine_that_is_not_in_the_table_is_reported(tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path, replace(H100, name="NVIDIA Something New"))
    assert check(found, "machine").status is CheckStatus.ABSENT and "Something New" in check(found, "machine").finding


def test_without_a_gpu_one_line_reports_that_and_the_other_checks_are_shown(tmp_path: Path) -> None:
    found = snapshot_without_gpu(tmp_path)
    lines = [line for line, _ in render_lines(all_checks(found), None)]
    assert sum("no GPU" in line or "none: no NVIDIA driver" in line for line in lines) == 1
    assert any(line.startswith("✓ page size") for line in lines)
    names = {one.name for one in all_checks(found)}
    assert names == {one.name for one in all_checks(gh200_snapshot(tmp_path / "gpu"))}, "the report has the same checks"


def test_hidden_gpus_are_reported(tmp_path: Path) -> None:
    assert (
        "CUDA_VISIBLE_DEVICES is ''"
        in check(snapshot_without_gpu(tmp_path / "a", CUDA_VISIBLE_DEVICES=""), "GPU").finding
    )
    found = gh200_snapshot(tmp_path / "b", environ={"CUDA_VISIBLE_DEVICES": "2"})
    assert "CUDA_VISIBLE_DEVICES=2" in check(found, "GPU").finding


def test_hints_that_are_requested_without_a_gpu_are_off_with_the_reason(tmp_path: Path) -> None:
    found = snapshot_without_gpu(tmp_path, SIMPLETUNER_GH200_ENABLE_UVM_HINTS="1")
    assert check(found, "hints").status is CheckStatus.ABSENT
    assert "but no NVIDIA driver" in check(found, "hints").finding


def test_the_supertuner_variable_for_hints_overrides_that_of_the_gh200_forks(tmp_path: Path) -> None:
    environ = {
        "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
        "SUPERTUNER_GH200_OPTIMIZATIONS__ENABLE_UVM_HINTS": "false",
    }
    found = gh200_snapshot(tmp_path, environ=environ)
    assert not found.hints.on and found.hints.asked is False


@pytest.mark.parametrize("value", ["3.5", "7"])
def test_the_check_of_a_variable_shows_the_setting_and_its_value(value: str, tmp_path: Path) -> None:
    found = gh200_snapshot(tmp_path, environ={"GH200_UVM_OVERSUBSCRIPTION_RATIO": value})
    ratio = check(found, "ratio variable")
    assert ratio.status is CheckStatus.GOOD
    assert ratio.finding.endswith(f"memory.overflow.oversubscription_ratio = {float(value)}")


def test_a_missing_overflow_allocator_is_a_warning_only_with_a_gpu(tmp_path: Path) -> None:
    missing = NotAvailable("no compiler was there")
    assert (
        check(replace(gh200_snapshot(tmp_path / "a"), overflow_library=missing), "overflow allocator").status
        is CheckStatus.WARNING
    )
    assert (
        check(replace(snapshot_without_gpu(tmp_path / "b"), overflow_library=missing), "overflow allocator").status
        is CheckStatus.ABSENT
    )


def test_the_remedy_of_every_complaint_names_a_command(tmp_path: Path) -> None:
    everything = {name: value for files, _, _ in MISCONFIGURATIONS.values() for name, value in files.items()}
    environ = {name: value for _, variables, _ in MISCONFIGURATIONS.values() for name, value in variables.items()}
    worst = gh200_snapshot(tmp_path, files=everything, environ=environ, version=12040, torch=CPU_TORCH)
    poor = replace(worst.resources, shm_bytes=MIB, open_files=9, folder_free=1, compiler=None, host_available=MIB)
    worst = replace(worst, resources=poor, overflow_library=NotAvailable("not built"))
    found = complaints(worst)
    assert len(found) >= 14
    for name, result in found.items():
        assert result.remedy.count("`") >= 2, f"{name}: {result.remedy}"


def test_a_libcuda_without_nvidias_kernel_driver_is_a_stand_in(tmp_path: Path) -> None:
    assert figure_origin(folder_host(tmp_path / "none", {"proc/meminfo": ""})) == "stand-in"
    assert figure_origin(folder_host(tmp_path / "real", {"dev/nvidiactl": ""})) == "measured"


# ---- requirements


def test_requirements_are_met_on_a_good_machine_and_not_without_a_gpu(tmp_path: Path) -> None:
    good = examined(gh200_snapshot(tmp_path / "a", environ={"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1"}))
    names = tuple(name for name in REQUIREMENTS if name not in ("one-pool", "allocation"))
    assert unmet_requirements(names, good) == []
    nothing = examined(snapshot_without_gpu(tmp_path / "b"))
    unmet = {line.split(":")[0] for line in unmet_requirements(tuple(REQUIREMENTS), nothing)}
    assert unmet == {
        "gpu", "known-machine", "managed", "concurrent", "ats", "direct", "one-pool", "batch-calls", "cuda-torch",
        "stock-torch", "hints", "allocation",
    }  # fmt: skip


def test_a_requirement_whose_answer_is_unknown_is_not_met(tmp_path: Path) -> None:
    found = examined(gh200_snapshot(tmp_path, replace(H100, host_page_tables=None)))
    assert unmet_requirements(("ats",), found) == ["ats: the GPU uses the host's page tables (unknown)"]


def test_an_unknown_requirement_is_refused_with_the_list() -> None:
    with pytest.raises(
        OptionError, match="'managed,atz': unknown: atz; choose from gpu, known-machine, managed"
    ) as refused:
        parse_requirements("managed,atz")
    assert refused.value.exit_code == 2, "an invalid option, not an unmet requirement"
    with pytest.raises(OptionError, match="names no requirement; choose from gpu, known-machine"):
        parse_requirements(" , ")
    assert parse_requirements("ATS, managed,ats") == ("ats", "managed")


# ---- text


def test_a_check_is_one_line_in_a_pipe_and_wrapped_on_a_terminal() -> None:
    long = CheckResult("host", "page size", CheckStatus.BAD, "word " * 30, "do `this and that` now")
    assert len(check_lines(long, None)) == 1
    for width in (80, 100, 120):
        lines = check_lines(long, width)
        assert all(len(line) <= width for line in lines)
        assert lines[0].startswith("✗ page size") and all(line.startswith(" " * 22) for line in lines[1:])
        assert "`this and that`" in lines[-1]


def test_a_command_is_not_broken_if_it_fits_on_a_line() -> None:
    command = "`sudo apt install linux-nvidia-64k-hwe-24.04`"
    lines = check_lines(
        CheckResult("host", "x", CheckStatus.BAD, "y", f"some words before it, and {command}, then more"), 80
    )
    assert any(command in line for line in lines)


def test_control_characters_in_a_finding_do_not_reach_the_terminal() -> None:
    lines = check_lines(CheckResult("GPU", "GPU", CheckStatus.GOOD, "NVIDIA \x1b[31m evil\nname"), None)
    assert "\x1b" not in lines[0] and "\n" not in lines[0]


def test_without_unicode_the_signs_are_ascii() -> None:
    assert (
        can_encode_signs("utf-8")
        and not can_encode_signs("ascii")
        and not can_encode_signs("latin-1")
        and not can_encode_signs("no-such")
    )
    line = check_lines(CheckResult("GPU", "SUPERTUNER_…", CheckStatus.BAD, "2 × y", "z"), None, PLAIN_SIGNS)[0]
    assert to_ascii(line) == "x SUPERTUNER_...        2 x y  -> z"


def test_the_summary_counts_the_shown_checks(tmp_path: Path) -> None:
    checks = all_checks(snapshot_without_gpu(tmp_path))
    assert summary(checks).startswith(f"{len(visible_checks(checks))} checks: ")


def test_a_gpu_that_only_torch_sees_is_bad_with_a_remedy(tmp_path: Path) -> None:
    found = check(snapshot_without_gpu(tmp_path, torch=STOCK), "GPU")
    assert (
        found.status is CheckStatus.BAD and "torch sees 1, but SuperTuner sees none: no NVIDIA driver" in found.finding
    )
    assert "`pip install -e .`" in found.remedy


def test_allocator_settings_that_this_torch_does_not_know_are_bad(tmp_path: Path) -> None:
    environ = {"PYTORCH_ALLOC_CONF": "no_such_key:1,max_split_size_mb:64"}
    snapshot = gh200_snapshot(tmp_path, environ=environ, torch=replace(STOCK, refuses=("no_such_key",)))
    found = check(snapshot, "allocator settings")
    assert found.status is CheckStatus.BAD and found.finding.startswith("torch does not know no_such_key and fails")
    assert found.remedy == "correct it, or `unset PYTORCH_ALLOC_CONF`"


# ---- torch, examined in a child process


def test_invalid_allocator_settings_do_not_prevent_the_examination_of_torch() -> None:
    import os

    found = probe_torch({**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True", "PYTORCH_ALLOC_CONF": "nonsense"})
    assert found.problem is None and found.version is not None
    assert found.patched is None or found.cuda is not None, "a build without CUDA accepts any key"


def test_a_torch_that_hangs_crashes_or_prints_garbage_is_a_problem_in_the_result(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 60\n")
    python.chmod(0o755)
    assert probe_torch({"PATH": "/usr/bin:/bin"}, str(python), timeout_s=0.2).problem is not None
    assert parse_answer("", "Segmentation fault", -11).problem == "importing it ended with code -11: Segmentation fault"
    assert parse_answer("hello\n{not json", "", 0).problem == "importing it ended with code 0: no output"
    assert parse_answer('noise\n{"version": "2.13.0+cu130", "cuda": "13.0", "sees": 2, "patched": true}', "", 0).patched
