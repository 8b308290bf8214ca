"""The proof that dependencies install on aarch64 is current, reads markers as that machine would, and can fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_aarch64", ROOT / "scripts/check_aarch64.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_aarch64"] = module
    spec.loader.exec_module(module)
    return module


def copy_to(folder: Path) -> Path:
    (folder / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/check_aarch64.py", "scripts/aarch64_wheels.json"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_offline(folder: Path) -> subprocess.CompletedProcess[str]:
    """The check on a machine whose index does not answer."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    environment = {**os.environ, **nowhere, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    command = [sys.executable, str(folder / "scripts/check_aarch64.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_proof_is_current_and_needs_no_network(tmp_path: Path) -> None:
    done = run_offline(copy_to(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_changed_dependency_without_a_network_is_a_clear_failure(tmp_path: Path) -> None:
    constraints = copy_to(tmp_path) / "constraints.txt"
    constraints.write_text(constraints.read_text().replace("\nnumpy==", "\nnumpy==0.0."))
    done = run_offline(tmp_path)
    assert done.returncode == 1
    assert "the dependencies changed, but the package index is unreachable" in done.stderr
    assert "with a network, and commit the result" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_developers_tool_may_change_without_a_new_proof(tmp_path: Path) -> None:
    constraints = copy_to(tmp_path) / "constraints.txt"
    constraints.write_text(constraints.read_text().replace("\npytest==", "\npytest==0.0."))
    assert run_offline(tmp_path).returncode == 0


def test_every_wheel_named_runs_on_aarch64_or_anywhere(script: ModuleType) -> None:
    import json

    proof = json.loads(script.PROOF.read_text())
    assert sorted(proof["wheels"]) == sorted(script.PYTHONS)
    for python, wheels in proof["wheels"].items():
        for name, file in wheels.items():
            fallback = script.FALLBACKS.get((name, python))
            fits = file.endswith(".whl") and ("aarch64" in file or "-none-any" in file)
            assert fits or (fallback and file == f"fallback: {fallback}"), (python, name, file)


@pytest.mark.parametrize(
    ("requirement", "needed"),
    [
        ("a", True),
        ("a; platform_machine == 'aarch64'", True),
        ("a; platform_machine == 'x86_64'", False),
        ("a; sys_platform == 'win32'", False),
        ("a; python_version < '3.12'", False),
        ("a; extra == 'gui'", False),
        ("a; extra == 'fast'", True),
    ],
)
def test_markers_are_read_as_that_machine_would(script: ModuleType, requirement: str, needed: bool) -> None:
    assert script.applies(Requirement(requirement), "3.12", ["fast"]) is needed
