"""The command `supertuner doctor`: fields of its report, the file it may write, its output and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.core.errors import SuperTunerError
from supertuner.core.events import NullSink
from supertuner.core.types import JSON
from supertuner.memory.emulator.superchip import EmulatedSuperchip
from supertuner.memory.machines import MACHINES
from supertuner.memory.nvml import NvmlGpuFacts
from supertuner.tools.doctor import doctor_report as report
from supertuner.tools.doctor.allocation import AllocationTestResult
from supertuner.tools.doctor.allocation_checks import allocation_checks
from supertuner.tools.doctor.allocation_plan import AllocationTestSkipped
from supertuner.tools.doctor.examination import run_allocation_test
from supertuner.tools.doctor.requirements import REQUIREMENTS, DoctorFindings, all_checks
from tests.fakes.fake_libraries import environment
from tests.memory.machine_files import folder_host, gh200_files
from tests.tools.doctor.snapshots import gh200_snapshot, snapshot_without_gpu

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "doctor.md"
FREE_KEYS = ("host.uvm_parameters", "environment.allocator")
"""Objects with arbitrary keys."""


def examined(root: Path) -> DoctorFindings:
    """Findings for a GH200 with every field of the report: NVML facts and an allocation test on the emulator."""
    chip = EmulatedSuperchip(MACHINES["gh200-96"])
    named = [replace(device, name="NVIDIA GH200 480GB") for device in chip.devices()]
    found = gh200_snapshot(root / "machine", *named, environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    nvml = NvmlGpuFacts(0, "NVIDIA GH200 480GB", "GPU-1", 96 << 30, 1980, 900.0)
    gpus = tuple(replace(gpu, nvml=nvml) for gpu in found.facts.gpus)
    found = replace(found, facts=replace(found.facts, gpus=gpus))
    result = run_allocation_test(
        found.facts, chip, folder_host(root / "host", gh200_files()), 1.1, NullSink(), lambda: chip.seconds
    )
    assert isinstance(result, AllocationTestResult) and result.passed
    return DoctorFindings(found, (*all_checks(found), *allocation_checks(result, "modelled")), result)


def fields(value: JSON, path: str = "") -> Iterator[str]:
    """Every path of a report: `gpus[].name`. Objects with arbitrary keys count as one field."""
    if isinstance(value, Mapping) and path not in FREE_KEYS:
        for name, inner in value.items():
            yield from fields(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for one in value:
            yield from fields(one, f"{path}[]")
    else:
        yield path


def documented() -> set[str]:
    section = PAGE.read_text().split("## The report, field by field")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


# ---- the report


def test_the_documentation_lists_exactly_the_fields_of_the_report(tmp_path: Path) -> None:
    found = set(fields(report.build_report(examined(tmp_path), ["ats"], [])))
    assert found == documented()


def test_without_a_gpu_the_report_has_the_same_shape(tmp_path: Path) -> None:
    found = snapshot_without_gpu(tmp_path)
    bare = report.build_report(DoctorFindings(found, all_checks(found), AllocationTestSkipped("no GPU")), [], [])
    top = {path.split(".")[0].split("[")[0] for path in documented()}
    assert set(bare) == top
    assert bare["gpus"] == [] and isinstance(bare["allocation"], dict)
    assert bare["allocation"]["made"] is False and bare["allocation"]["not_made"] == "no GPU"


def test_the_report_names_the_driver_and_when_it_was_made(tmp_path: Path) -> None:
    document = report.build_report(examined(tmp_path), [], [], made_at=datetime(2026, 11, 16, tzinfo=UTC))
    assert document["driver"]["body"] == "cuda"  # type: ignore[index, call-overload]
    assert document["made_at"] == "2026-11-16T00:00:00+00:00" and document["schema"] == 1


def test_a_report_can_contain_file_names_that_are_not_valid_utf_8(tmp_path: Path) -> None:
    found = snapshot_without_gpu(tmp_path)
    odd = replace(found, resources=replace(found.resources, folder="/data/\udcff"))
    path = tmp_path / "report.json"
    report.write_report(path, report.build_report(DoctorFindings(odd, (), AllocationTestSkipped("x")), [], []))
    assert json.loads(path.read_bytes())["report"] == "supertuner doctor"


# ---- the file


def test_only_a_doctors_report_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert report.report_path(path, overwrite=False) == path
    report.write_report(path, {"report": report.REPORT_KIND})
    assert report.report_path(path, overwrite=False) == path
    for foreign in (b"", b"my notes", b"{}", b'{"report": "another"}', b"[1]", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(foreign)
        with pytest.raises(SuperTunerError, match="is not a report of `supertuner doctor`"):
            report.report_path(path, overwrite=False)
        assert path.read_bytes() == foreign
        assert report.report_path(path, overwrite=True) == path


def test_a_missing_folder_and_a_path_that_is_not_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SuperTunerError, match="is not a folder; create it"):
        report.report_path(tmp_path / "missing" / "report.json", overwrite=True)
    with pytest.raises(SuperTunerError, match="is not a file"):
        report.report_path(tmp_path, overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SuperTunerError, match="is not a file"):
        report.report_path(tmp_path / "pipe", overwrite=True)
    (tmp_path / "stdout").symlink_to(tmp_path / "pipe")
    for standard_output in (tmp_path / "stdout", Path("-")):
        with pytest.raises(SuperTunerError, match="use --json to print the report"):
            report.report_path(standard_output, overwrite=True)


def test_a_link_stays_a_link_and_its_target_gets_the_report(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    target = report.report_path(tmp_path / "link.json", overwrite=False)
    report.write_report(target, {"report": report.REPORT_KIND})
    assert (tmp_path / "link.json").is_symlink() and report.is_doctor_report(tmp_path / "target.json")
    (tmp_path / "target.json").write_text("notes")
    with pytest.raises(SuperTunerError, match="is not a report of"):
        report.report_path(tmp_path / "link.json", overwrite=False)


@pytest.mark.requires(os.getuid() != 0, reason="root may write to every folder")
def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SuperTunerError, match="its folder is not writable"):
        report.report_path(tmp_path / "report.json", overwrite=False)


# ---- the command

BESIDE_A_GPU = 0 if torch.version.cuda else 1
"""The exit code of a doctor that found a GPU and nothing else: 1 with a CPU-only torch."""


def doctor(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, command: str = ""
) -> subprocess.CompletedProcess[str]:
    started = [command] if command else ["-c", "from supertuner.cli import main; main()", "doctor"]
    program = [sys.executable, *started]
    environ = {**(env or os.environ), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*program, *arguments], env=environ, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.requires(not Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_a_report_is_written_and_unmet_requirements_are_printed(tmp_path: Path) -> None:
    done = doctor("--require", "gpu,managed", cwd=tmp_path)
    written = json.loads((tmp_path / "gh200_diagnostic_report.json").read_text())
    assert done.returncode == 1
    assert done.stderr == "not met: gpu: a GPU\nnot met: managed: managed memory\n"
    assert sum("none: " in line for line in done.stdout.splitlines()) == 1
    assert len(done.stdout.splitlines()) == len([c for c in written["checks"] if c["finding"] != "no GPU"]) + 2


def test_on_the_fake_driver_the_allocation_test_runs_and_is_reported(tmp_path: Path) -> None:
    done = doctor("--report", "mine.json", env=environment("gh200"), cwd=tmp_path)
    assert done.returncode == BESIDE_A_GPU, done.stderr
    assert "96.0 MiB of managed memory on a GPU with 64.0 MiB: filled, 48 of 48 blocks" in done.stdout
    written = json.loads((tmp_path / "mine.json").read_text())
    assert not (tmp_path / "gh200_diagnostic_report.json").exists()
    assert written["driver"]["body"] == "cuda" and written["driver"]["library"].endswith("libcuda.so.1")
    allocation = written["allocation"]
    assert allocation["passed"] and allocation["beyond_gpu_memory"] and allocation["verified"] == 48
    assert {rate["name"] for rate in allocation["rates"]} >= {"first touch", "host to GPU", "GPU to host"}
    if not Path("/proc/driver/nvidia/version").exists():
        assert allocation["figures"] == "stand-in" and "of a stand-in for libcuda" in done.stdout


@pytest.mark.parametrize(("profile", "driver"), [("gb10", 13000), ("pcie", 12080)])
def test_json_prints_the_report_and_writes_no_file(profile: str, driver: int, tmp_path: Path) -> None:
    done = doctor("--json", "--require", "batch-calls", env=environment(profile, driver=driver), cwd=tmp_path)
    printed = json.loads(done.stdout)
    assert list(tmp_path.iterdir()) == []
    assert done.returncode == (BESIDE_A_GPU if driver >= 13000 else 1)
    assert printed["requirements"]["unmet"] == (
        [] if driver >= 13000 else ["batch-calls: a driver for CUDA 13 or newer"]
    )
    allocation = printed["allocation"]
    assert allocation["passed"] and allocation["beyond_gpu_memory"] is (profile == "pcie")
    if profile == "gb10":
        assert "one pool" in allocation["limited"]


@pytest.mark.requires(torch.version.cuda is None, reason="this torch is a CUDA build")
def test_a_gpu_beside_a_cpu_only_torch_fails_loudly(tmp_path: Path) -> None:
    done = doctor("--skip-allocation", env=environment("gh200"), cwd=tmp_path)
    assert done.returncode == 1
    assert "is a CPU build, and this machine has a GPU: `make setup TORCH=cuda`" in done.stderr


def test_a_gpu_without_managed_memory_has_no_allocation_test(tmp_path: Path) -> None:
    done = doctor("--json", env=environment("no_uvm"), cwd=tmp_path)
    assert done.returncode == BESIDE_A_GPU
    assert "no managed memory" in json.loads(done.stdout)["allocation"]["not_made"]


def test_a_driver_error_in_the_allocation_test_is_a_finding(tmp_path: Path) -> None:
    env = environment("gh200", faults="cuMemsetD8Async=1@5x1")
    done = doctor("--json", "--require", "allocation", env=env, cwd=tmp_path)
    assert done.returncode == 1 and "not met: allocation: " in done.stderr
    found = json.loads(done.stdout)
    assert found["allocation"]["passed"] is False and "CUDA_ERROR_INVALID_VALUE" in found["allocation"]["problem"]


@pytest.mark.parametrize(("call", "group"), [("cuDeviceGetName", "GPU"), ("cuMemGetInfo", "allocation")])
def test_a_failing_driver_call_is_a_finding_and_the_other_checks_run(call: str, group: str, tmp_path: Path) -> None:
    done = doctor("--json", env=environment("gh200", faults=f"{call}=999@1x99"), cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    failed = [check for check in json.loads(done.stdout)["checks"] if "CUDA_ERROR_UNKNOWN" in check["finding"]]
    assert group in {check["group"] for check in failed}


def test_gh200_diagnostic_py_takes_the_options_of_the_doctor_and_replaces_the_last_report(tmp_path: Path) -> None:
    report.write_report(tmp_path / report.DEFAULT_NAME, {"report": report.REPORT_KIND})
    done = doctor(
        "--oversubscription-scale", "1.5", "--skip-allocation", command=str(ROOT / "gh200_diagnostic.py"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "gh200_diagnostic_report.json").read_text())["checks"]
    assert "not run: --skip-allocation" in done.stdout


def test_help_names_every_requirement() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    words = re.sub(r"[│\s]+", " ", shown)
    assert ", ".join(REQUIREMENTS) in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--require", "atz"], "unknown: atz; choose from gpu"),
        (["--report", "no/such/folder/r.json"], "is not a folder"),
        (["--report", "notes.txt"], "exists and is not a report"),
    ],
)
def test_invalid_options_are_refused_before_any_check_runs(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(result.exception, SuperTunerError) and message in str(result.exception)
    assert result.output == "" and (tmp_path / "notes.txt").read_text() == "mine"


def test_on_a_terminal_no_line_is_longer_than_its_width(tmp_path: Path) -> None:
    columns = 80
    code = (
        "import fcntl, struct, sys, termios\n"
        f"fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 40, {columns}, 0, 0))\n"
        "from supertuner.cli import main\n"
        "main(['doctor', '--skip-allocation'])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "GH200_UVM_ACCESS_PATTERN": "fast"}
    environ = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environ, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    try:
        while part := os.read(ours, 65536):
            output += part
    except OSError:
        pass  # the child has ended and closed its end
    os.close(ours)
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output.decode()).replace("\r", "")
    lines = text.splitlines()
    assert "host" in lines and any(line.startswith("✗ pattern variable") for line in lines)
    too_long = [line for line in lines if len(line) > columns and str(tmp_path) not in line]  # a path is one word
    assert too_long == []
