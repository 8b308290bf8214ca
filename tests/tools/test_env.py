"""`supertuner env` and scripts/setup_gh200_env.sh export the same values, keep existing ones, change nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from supertuner.cli import app
from supertuner.config.sources import gh200_exports as exports
from supertuner.config.sources.environment import SETTING_BY_VARIABLE
from supertuner.config.sources.load import load_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup_gh200_env.sh"
NAMES = [export.name for export in exports.GH200_EXPORTS]
DEFAULTS = {export.name: export.value for export in exports.GH200_EXPORTS}
SHELLS = [shell for shell in ("bash", "dash", "zsh", "ksh", "busybox") if shutil.which(shell)]
CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
SHOW = "\n".join(f'printf "%s=%s|" {name} "${{{name}-unset}}"' for name in NAMES)


def shell(kind: str, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [kind, "sh", "-c", script] if kind == "busybox" else [kind, "-c", script]
    return subprocess.run(command, env={**CLEAN, **environ}, capture_output=True, text=True, cwd="/", check=False)


def exported(kind: str, script: str, **environ: str) -> dict[str, str]:
    """The values of our variables in a program that the shell starts."""
    done = shell(kind, f"{script}\nenv", **environ)
    assert done.returncode == 0, done.stderr
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name: seen[name] for name in NAMES if name in seen}


def test_the_values_are_those_of_the_gh200_forks() -> None:
    assert DEFAULTS == {
        "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
        "GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0",
        "GH200_UVM_ACCESS_PATTERN": "gpu_first",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }


def test_every_variable_sets_a_setting_to_a_valid_value() -> None:
    assert set(NAMES) == set(SETTING_BY_VARIABLE)
    dataset = {"datasets": [{"dataset_type": "image"}]}
    config = load_config(None, overrides=dataset, environ=DEFAULTS, check_paths=False).config
    assert config.gh200_optimizations.enable_uvm_hints is True
    assert config.memory.overflow.oversubscription_ratio == 5.0
    assert config.memory.overflow.access_pattern == "gpu_first"
    assert config.train.mixed_precision == "bf16"


def test_the_variables_add_no_note_to_a_configuration() -> None:
    overrides = {"datasets": [{"dataset_type": "image"}]}
    without = load_config(None, overrides=overrides, environ={}, check_paths=False).notes
    assert load_config(None, overrides=overrides, environ=DEFAULTS, check_paths=False).notes == without


def test_the_script_contains_the_values_of_the_table() -> None:
    assert dict(re.findall(r'^: "\$\{(\w+)=([^}]*)\}"$', SCRIPT.read_text(), re.MULTILINE)) == DEFAULTS


@pytest.mark.parametrize("kind", SHELLS)
def test_script_and_command_export_the_same_variables(kind: str) -> None:
    printed = CliRunner(env=dict.fromkeys(NAMES)).invoke(app, ["env"]).output
    assert exported(kind, f". {SCRIPT}") == exported(kind, printed) == DEFAULTS


@pytest.mark.parametrize("kind", SHELLS)
@pytest.mark.parametrize("value", ["3.0", "", 'it\'s $HOME `x` "y" \\', "a b"])
def test_an_existing_value_is_kept(kind: str, value: str) -> None:
    name = "GH200_UVM_OVERSUBSCRIPTION_RATIO"
    assert exported(kind, f". {SCRIPT}", **{name: value}) == {**DEFAULTS, name: value}
    printed = CliRunner(env={**dict.fromkeys(NAMES), name: value}).invoke(app, ["env"]).output
    assert exported(kind, printed) == {**DEFAULTS, name: value}


@pytest.mark.parametrize("kind", SHELLS)
def test_the_value_of_an_unexported_shell_variable_is_kept(kind: str) -> None:
    mine = "GH200_UVM_ACCESS_PATTERN=balanced"
    printed = CliRunner(env=dict.fromkeys(NAMES)).invoke(app, ["env"]).output
    for script in (f". {SCRIPT}", printed):
        assert exported(kind, f"{mine}\n{script}")["GH200_UVM_ACCESS_PATTERN"] == "balanced"


@pytest.mark.parametrize("kind", SHELLS)
def test_a_read_only_variable_is_exported_with_its_value(kind: str) -> None:
    found = exported(kind, f"readonly ACCELERATE_MIXED_PRECISION=fp16\n. {SCRIPT}")
    assert found == {**DEFAULTS, "ACCELERATE_MIXED_PRECISION": "fp16"}


@pytest.mark.parametrize("kind", SHELLS)
def test_the_script_works_in_a_strict_shell_and_without_standard_error(kind: str) -> None:
    strict = "set -eu" + ("; set -o pipefail" if kind in ("bash", "zsh", "ksh") else "")
    for closing in ("", " 2>&-"):
        done = shell(kind, f"{strict}; . {SCRIPT}{closing}; printf alive")
        assert (done.returncode, done.stdout) == (0, "alive"), done.stderr


@pytest.mark.parametrize("kind", SHELLS)
def test_sourcing_prints_one_line_on_standard_error_and_nothing_on_standard_output(kind: str) -> None:
    done = shell(kind, f". {SCRIPT}")
    assert done.stdout == ""
    assert done.stderr == "gh200 env: hints 1, ratio 5.0, gpu_first, bf16\n"


@pytest.mark.parametrize("kind", SHELLS)
def test_sourcing_changes_no_option_function_or_other_variable(kind: str) -> None:
    """Compares the output of `set` and `set -o` before and after, without variables that the shell itself changes."""
    look = 'printf "%s\\n" "$-"; set +o; set'
    own = re.compile(r"^(BASH_\w+|LINENO|RANDOM|SRANDOM|SECONDS|EPOCH\w+|PIPESTATUS|_|PPID|TTYIDLE|ZSH_\w+|status|\?)=")
    done = shell(kind, f"{{ {look}; }}\nprintf '%s\\n' ====\n. {SCRIPT}\n{{ {look}; }}")
    before, after = done.stdout.split("====\n")
    fresh = {line for line in after.splitlines() if not own.match(line)} - set(before.splitlines())
    assert {line.split("=")[0] for line in fresh} == set(NAMES)


def test_the_script_needs_neither_python_nor_any_other_program() -> None:
    done = shell("bash", f"PATH=/nowhere\n. {SCRIPT}\n{SHOW}")
    assert done.stdout == "".join(f"{name}={value}|" for name, value in DEFAULTS.items())
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", [shell for shell in SHELLS if shell != "zsh"])
def test_running_the_script_instead_of_sourcing_it_prints_a_warning(kind: str) -> None:
    done = subprocess.run([kind, *(["sh"] if kind == "busybox" else []), str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0
    assert "run, not sourced" in done.stderr


def test_the_script_exports_nothing_that_stock_torch_rejects() -> None:
    code = [line for line in SCRIPT.read_text().splitlines() if not line.startswith("#")]
    assert not any("PYTORCH" in line for line in code) and not any("PYTORCH" in name for name in NAMES)


def test_json_lists_value_default_setting_and_readers() -> None:
    environ = {**dict.fromkeys(NAMES), "GH200_UVM_ACCESS_PATTERN": "balanced"}
    table = json.loads(CliRunner(env=environ).invoke(app, ["env", "--json"]).output)
    assert list(table) == NAMES
    assert table["GH200_UVM_ACCESS_PATTERN"] == {
        "value": "balanced",
        "default": "gpu_first",
        "set": True,
        "setting": "memory.overflow.access_pattern",
        "readers": table["GH200_UVM_ACCESS_PATTERN"]["readers"],
    }
    assert all(table[name]["readers"] for name in NAMES)


def test_the_docs_list_each_variable_with_its_setting() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    for export in exports.GH200_EXPORTS:
        assert re.search(rf"^\| `{export.name}` \| `{export.value}` \| `{export.setting}` \|", page, re.MULTILINE)
