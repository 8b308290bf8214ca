"""The doctor's checks: each trap is found and only where it is one, and each remedy names a command."""

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
from tests.tools.doctor.doctoring import CPU_TORCH, STOCK, check, situation, troubles, without_gpu


def examined(found: SystemSnapshot) -> DoctorFindings:
    return DoctorFindings(found, all_checks(found), AllocationTestSkipped("not tried here"))


def test_a_gh200_in_good_order_gets_no_complaint(tmp_path: Path) -> None:
    found = situation(tmp_path, environ={"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1"})
    assert troubles(found) == {}
    assert check(found, "machine").finding.startswith("GH200 96 GB (gh200-96), NVLink-C2C; aarch64")
    assert check(found, "hints").status is CheckStatus.GOOD


TRAPS: Mapping[str, tuple[dict[str, str | bytes], dict[str, str], str]] = {
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


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_with_the_command_that_ends_it(name: str, tmp_path: Path) -> None:
    files, environ, command = TRAPS[name]
    found = troubles(situation(tmp_path, files=files, environ=environ))
    assert list(found) == [name]
    assert command in found[name].remedy


def test_little_memory_is_a_warning_and_next_to_none_is_bad(tmp_path: Path) -> None:
    found = situation(tmp_path)
    little = replace(found, around=replace(found.resources, host_available=100 * GIB))
    none = replace(found, around=replace(found.resources, host_available=9 * GIB))
    assert check(little, "memory").status is CheckStatus.WARNING and "arena ls" in check(little, "memory").remedy
    assert check(none, "memory").status is CheckStatus.BAD


def test_a_small_dev_shm_few_open_files_and_a_full_disk_are_found(tmp_path: Path) -> None:
    found = situation(tmp_path)
    poor = replace(
        found.resources, shm_bytes=64 * MIB, shm_free=64 * MIB, open_files=1024, folder_free=GIB, compiler=None
    )
    assert set(troubles(replace(found, around=poor))) == {"/dev/shm", "open files", "disk", "compiler"}
    gone = replace(found, around=replace(found.resources, shm_bytes=None, shm_free=None))
    assert check(gone, "/dev/shm").status is CheckStatus.BAD


def test_a_driver_before_cuda_13_has_no_batch_calls(tmp_path: Path) -> None:
    found = situation(tmp_path, version=12080, torch=replace(STOCK, cuda="12.8"))
    assert list(troubles(found)) == ["driver"]
    assert "CUDA 12.8" in check(found, "driver").finding and "580" in check(found, "driver").remedy


@pytest.mark.parametrize(
    ("torch", "part"),
    [
        (CPU_TORCH, "a build without CUDA"),
        (replace(STOCK, sees=0), "sees no GPU, though the driver has one"),
        (replace(STOCK, cuda="14.0", sees=0), "newer than the driver"),
        (TorchProbeResult(problem="ImportError: libcudart.so.13: no such file"), "libcudart.so.13"),
        (TorchProbeResult(version="2.13.0+rocm6.4", hip="6.4"), "ROCm"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_found(torch: TorchProbeResult, part: str, tmp_path: Path) -> None:
    found = situation(tmp_path, torch=torch)
    assert list(troubles(found)) == ["torch"]
    assert check(found, "torch").status is CheckStatus.BAD and part in check(found, "torch").finding


def test_a_patched_torch_is_recognised_and_its_keys_are_then_fine(tmp_path: Path) -> None:
    found = situation(tmp_path, torch=replace(STOCK, patched=True), environ={"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"})
    assert list(troubles(found)) == ["patches"]
    assert check(found, "allocator settings").status is CheckStatus.GOOD


def test_keys_of_a_patched_torch_break_a_stock_one_and_are_ignored_by_one_without_cuda(tmp_path: Path) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,use_uvm:True"}
    stock = check(situation(tmp_path / "a", environ=environ), "allocator settings")
    assert stock.status is CheckStatus.BAD and "PYTORCH_CUDA_ALLOC_CONF holds use_uvm" in stock.finding
    without = check(situation(tmp_path / "b", environ=environ, torch=CPU_TORCH), "allocator settings")
    assert without.status is CheckStatus.WARNING
    typo = {"PYTORCH_ALLOC_CONF": "use_uvm:True,uvm_acess_pattern:gpu_first"}
    told = check(situation(tmp_path / "c", environ=typo, torch=CPU_TORCH), "allocator settings")
    assert told.status is CheckStatus.BAD and "did you mean uvm_access_pattern?" in told.finding


def test_settings_that_stock_torch_knows_are_no_trap(tmp_path: Path) -> None:
    text = "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"
    assert (
        check(situation(tmp_path, environ={"PYTORCH_CUDA_ALLOC_CONF": text}), "allocator settings").status
        is CheckStatus.GOOD
    )


def test_what_is_a_trap_on_grace_is_none_elsewhere(tmp_path: Path) -> None:
    files = {"proc/self/auxv": auxv(4 * KIB), "proc/sys/kernel/numa_balancing": "1\n"}
    assert troubles(situation(tmp_path / "pcie", H100, files=files)) == {}
    assert troubles(situation(tmp_path / "pool", GB10, files=files)) == {}


def test_a_gh200_whose_gpu_does_not_use_the_hosts_page_tables_is_wrong(tmp_path: Path) -> None:
    lame = replace(GH200, host_page_tables=False, pageable=False)
    assert check(situation(tmp_path / "a", lame), "ATS").status is CheckStatus.BAD
    assert check(situation(tmp_path / "b", H100), "ATS").status is CheckStatus.ABSENT


def test_a_gpu_without_managed_memory_or_concurrent_access_is_told(tmp_path: Path) -> None:
    none = replace(H100, managed=False, concurrent_managed=False)
    assert set(troubles(situation(tmp_path, none))) == {"managed memory", "concurrent access"}


def test_what_the_driver_does_not_say_is_neither_good_nor_bad(tmp_path: Path) -> None:
    silent = replace(
        H100, managed=None, concurrent_managed=None, host_page_tables=None, direct_host_access=None, integrated=None
    )
    found = situation(tmp_path, silent)
    for name in ("managed memory", "concurrent access", "ATS", "direct access"):
        assert check(found, name).status is CheckStatus.ABSENT and "not say" in check(found, name).finding


def test_a_machine_that_is_in_no_table_is_said_to_be_so(tmp_path: Path) -> None:
    found = situation(tmp_path, replace(H100, name="NVIDIA Something New"))
    assert check(found, "machine").status is CheckStatus.ABSENT and "Something New" in check(found, "machine").finding


def test_without_a_gpu_one_line_says_so_and_the_rest_is_reported(tmp_path: Path) -> None:
    found = without_gpu(tmp_path)
    lines = [line for line, _ in render_lines(all_checks(found), None)]
    assert sum("no GPU" in line or "none: no NVIDIA driver" in line for line in lines) == 1
    assert any(line.startswith("✓ page size") for line in lines)
    names = {one.name for one in all_checks(found)}
    assert names == {one.name for one in all_checks(situation(tmp_path / "gpu"))}, "the report has the same checks"


def test_hidden_gpus_are_told(tmp_path: Path) -> None:
    assert "CUDA_VISIBLE_DEVICES is ''" in check(without_gpu(tmp_path / "a", CUDA_VISIBLE_DEVICES=""), "GPU").finding
    found = situation(tmp_path / "b", environ={"CUDA_VISIBLE_DEVICES": "2"})
    assert "CUDA_VISIBLE_DEVICES=2" in check(found, "GPU").finding


def test_hints_that_are_asked_for_where_there_is_no_gpu_say_why_they_are_off(tmp_path: Path) -> None:
    found = without_gpu(tmp_path, SIMPLETUNER_GH200_ENABLE_UVM_HINTS="1")
    assert check(found, "hints").status is CheckStatus.ABSENT
    assert "but no NVIDIA driver" in check(found, "hints").finding


def test_our_own_variable_for_hints_stands_above_the_seeds(tmp_path: Path) -> None:
    environ = {
        "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
        "SUPERTUNER_GH200_OPTIMIZATIONS__ENABLE_UVM_HINTS": "false",
    }
    found = situation(tmp_path, environ=environ)
    assert not found.hints.on and found.hints.asked is False


@pytest.mark.parametrize("given", ["3.5", "7"])
def test_a_variable_says_what_it_gives(given: str, tmp_path: Path) -> None:
    found = situation(tmp_path, environ={"GH200_UVM_OVERSUBSCRIPTION_RATIO": given})
    ratio = check(found, "ratio variable")
    assert ratio.status is CheckStatus.GOOD
    assert ratio.finding.endswith(f"memory.overflow.oversubscription_ratio = {float(given)}")


def test_a_missing_plugin_is_a_warning_with_a_gpu_and_no_matter_without(tmp_path: Path) -> None:
    missing = NotAvailable("no compiler was there")
    assert (
        check(replace(situation(tmp_path / "a"), overflow=missing), "overflow allocator").status is CheckStatus.WARNING
    )
    assert (
        check(replace(without_gpu(tmp_path / "b"), overflow=missing), "overflow allocator").status is CheckStatus.ABSENT
    )


def test_every_remedy_of_a_complaint_names_a_command(tmp_path: Path) -> None:
    everything = {name: value for files, _, _ in TRAPS.values() for name, value in files.items()}
    environ = {name: value for _, variables, _ in TRAPS.values() for name, value in variables.items()}
    worst = situation(tmp_path, files=everything, environ=environ, version=12040, torch=CPU_TORCH)
    poor = replace(worst.resources, shm_bytes=MIB, open_files=9, folder_free=1, compiler=None, host_available=MIB)
    worst = replace(worst, around=poor, overflow=NotAvailable("not built"))
    found = troubles(worst)
    assert len(found) >= 14
    for name, one in found.items():
        assert one.remedy.count("`") >= 2, f"{name}: {one.remedy}"


def test_a_library_without_a_kernel_driver_below_it_is_a_stand_in(tmp_path: Path) -> None:
    assert figure_origin("cuda", folder_host(tmp_path / "none", {"proc/meminfo": ""})) == "stand-in"
    assert figure_origin("cuda", folder_host(tmp_path / "real", {"dev/nvidiactl": ""})) == "measured"
    assert figure_origin("model", folder_host(tmp_path / "model", {"dev/nvidiactl": ""})) == "modelled"


# ---- what may be required


def test_requirements_are_met_by_what_they_name(tmp_path: Path) -> None:
    good = examined(situation(tmp_path / "a", environ={"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1"}))
    names = tuple(name for name in REQUIREMENTS if name not in ("one-pool", "allocation"))
    assert unmet_requirements(names, good) == []
    nothing = examined(without_gpu(tmp_path / "b"))
    left = {line.split(":")[0] for line in unmet_requirements(tuple(REQUIREMENTS), nothing)}
    assert left == {
        "gpu", "known-machine", "managed", "concurrent", "ats", "direct", "one-pool", "batch-calls", "cuda-torch",
        "stock-torch", "hints", "allocation",
    }  # fmt: skip


def test_what_nobody_knows_is_not_met(tmp_path: Path) -> None:
    found = examined(situation(tmp_path, replace(H100, host_page_tables=None)))
    assert unmet_requirements(("ats",), found) == ["ats: the GPU uses the host's page tables (nobody says)"]


def test_an_unknown_requirement_is_refused_with_the_list() -> None:
    with pytest.raises(OptionError, match="'managed,atz': atz is not one of gpu, known-machine, managed") as refused:
        parse_requirements("managed,atz")
    assert refused.value.exit_code == 2, "a mistake in the options, not a requirement that is not met"
    with pytest.raises(OptionError, match="names nothing; it takes gpu, known-machine"):
        parse_requirements(" , ")
    assert parse_requirements("ATS, managed,ats") == ("ats", "managed")


# ---- how it looks


def test_a_check_is_one_line_in_a_pipe_and_folded_on_a_terminal() -> None:
    long = CheckResult("host", "page size", CheckStatus.BAD, "word " * 30, "do `this and that` now")
    assert len(check_lines(long, None)) == 1
    for width in (80, 100, 120):
        lines = check_lines(long, width)
        assert all(len(line) <= width for line in lines)
        assert lines[0].startswith("✗ page size") and all(line.startswith(" " * 22) for line in lines[1:])
        assert "`this and that`" in lines[-1]


def test_a_command_is_not_broken_where_it_fits() -> None:
    command = "`sudo apt install linux-nvidia-64k-hwe-24.04`"
    lines = check_lines(
        CheckResult("host", "x", CheckStatus.BAD, "y", f"some words before it, and {command}, then more"), 80
    )
    assert any(command in line for line in lines)


def test_control_characters_in_a_finding_do_not_reach_the_terminal() -> None:
    lines = check_lines(CheckResult("GPU", "GPU", CheckStatus.GOOD, "NVIDIA \x1b[31m evil\nname"), None)
    assert "\x1b" not in lines[0] and "\n" not in lines[0]


def test_without_unicode_the_marks_are_plain() -> None:
    assert (
        can_encode_signs("utf-8")
        and not can_encode_signs("ascii")
        and not can_encode_signs("latin-1")
        and not can_encode_signs("no-such")
    )
    line = check_lines(CheckResult("GPU", "SUPERTUNER_…", CheckStatus.BAD, "2 × y", "z"), None, PLAIN_SIGNS)[0]
    assert to_ascii(line) == "x SUPERTUNER_...        2 x y  -> z"


def test_the_summary_counts_what_was_shown(tmp_path: Path) -> None:
    checks = all_checks(without_gpu(tmp_path))
    assert summary(checks).startswith(f"{len(visible_checks(checks))} checks: ")


def test_a_gpu_that_torch_sees_and_we_do_not_is_a_fault_with_its_remedy(tmp_path: Path) -> None:
    found = check(without_gpu(tmp_path, torch=STOCK), "GPU")
    assert found.status is CheckStatus.BAD and "torch sees 1, and we see none: no NVIDIA driver" in found.finding
    assert "`pip install -e .`" in found.remedy


def test_allocator_settings_that_this_torch_does_not_know_are_bad(tmp_path: Path) -> None:
    given = {"PYTORCH_ALLOC_CONF": "no_such_key:1,max_split_size_mb:64"}
    found = check(
        situation(tmp_path, environ=given, torch=replace(STOCK, refuses=("no_such_key",))), "allocator settings"
    )
    assert found.status is CheckStatus.BAD and found.finding.startswith("torch knows no no_such_key, and stops")
    assert found.remedy == "mend it, or `unset PYTORCH_ALLOC_CONF`"


# ---- torch, asked in a child


def test_torch_is_asked_in_a_child_that_no_setting_can_end() -> None:
    import os

    found = probe_torch({**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True", "PYTORCH_ALLOC_CONF": "nonsense"})
    assert found.problem is None and found.version is not None
    assert found.patched is None or found.cuda is not None, "a build without CUDA takes any key, which proves nothing"


def test_a_torch_that_hangs_dies_or_babbles_is_one_finding(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 60\n")
    python.chmod(0o755)
    assert probe_torch({"PATH": "/usr/bin:/bin"}, str(python), timeout_s=0.2).problem is not None
    assert parse_answer("", "Segmentation fault", -11).problem == "importing it ended with code -11: Segmentation fault"
    assert parse_answer("hello\n{not json", "", 0).problem == "importing it ended with code 0: it said nothing"
    assert parse_answer('noise\n{"version": "2.13.0+cu130", "cuda": "13.0", "sees": 2, "patched": true}', "", 0).patched
