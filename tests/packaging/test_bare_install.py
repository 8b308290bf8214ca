"""The wheel without extras: light commands work, commands that need torch name the extra, and torch is not installed.

The environment of the test has the base dependencies only: their installed copies are linked into a new environment,
which takes a second instead of a download.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from supertuner.cli import TRAIN_EXTRA_MODULES

ROOT = Path(__file__).resolve().parents[2]
MODULES_OF_PACKAGES = {"pillow": "PIL", "nvidia-ml-py": "pynvml", "lycoris-lora": "lycoris"}
"""Packages whose module has another name."""


def project() -> dict[str, object]:
    content: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


def requirement_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()


def with_dependencies(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions of these names and of what they require, each once; extras are left out."""
    seen: set[str] = set()
    while names:
        name = names.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # required on other platforms or versions only
        names += [requirement_name(text) for text in distribution.requires or () if "extra ==" not in text]
        yield distribution


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("bare")
    source = folder / "source"  # a copy: building in the checkout would pack what earlier builds left there
    shutil.copytree(ROOT / "supertuner", source / "supertuner", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    built = subprocess.run(
        [*build, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "env/lib" / version / "site-packages"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, env={"PATH": "/usr/bin:/bin"})  # without this PYTHONPATH
    base = project()["dependencies"]
    assert isinstance(base, list)
    for distribution in with_dependencies([requirement_name(text) for text in base]):
        for file in distribution.files or ():
            top = file.parts[0]
            link = site / top
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    return folder / "env/bin"


def write_config(folder: Path) -> None:
    (folder / "cats").mkdir()
    (folder / "cats/a.jpg").write_bytes(b"\xff\xd8")
    config = {"model": {"family": "wan2.2", "path": "tiny"}, "datasets": [{"instance_data_dir": "cats"}]}
    (folder / "run.json").write_text(json.dumps(config))


def run(bare: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [bare / "supertuner", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)},
    )


def test_torch_is_not_installed(bare: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare / "python", "-c", "import torch"], capture_output=True, text=True, check=False, cwd=tmp_path, env={}
    )
    assert "ModuleNotFoundError" in done.stderr


def test_light_commands_work(bare: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    for arguments in (("--version",), ("config", "validate", "run.json"), ("arena", "ls"), ("estimate", "--help")):
        done = run(bare, tmp_path, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)


@pytest.mark.parametrize(
    "command",
    [("quickstart",), ("estimate", "run.json"), ("train", "run.json"), ("adapter", "push", "runs/a", "someone/a")],
)
def test_a_command_that_needs_the_extra_names_it(bare: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    write_config(tmp_path)
    done = run(bare, tmp_path, *command)
    assert done.returncode == 2, done.stderr
    assert f"supertuner {command[0]} needs the extra \"train\": pip install 'supertuner[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_api_loads_a_configuration_without_torch(bare: Path, tmp_path: Path) -> None:
    program = "import supertuner as st; print(st.load_config({'train': {'batch_size': 3}}).config.train.batch_size)"
    done = subprocess.run(
        [bare / "python", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env={}
    )
    assert done.stdout == "3\n", done.stderr


def test_the_arena_needs_only_numpy_and_xxhash(bare: Path, tmp_path: Path) -> None:
    """Other programs' environments have neither pydantic nor rich."""
    program = (
        "import sys, supertuner.arena.home, supertuner.arena.reader, supertuner.arena.build;"
        "print(sorted({'pydantic', 'yaml', 'rich', 'typer', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [bare / "python", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env={}
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_modules_of_the_extra_are_known_to_the_command_line() -> None:
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    names = [requirement_name(text) for text in extras["train"]]
    assert {MODULES_OF_PACKAGES.get(name, name) for name in names} == TRAIN_EXTRA_MODULES
