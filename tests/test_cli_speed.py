"""The command line answers at once: no torch for --help or for checking a configuration, and a limit in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Runs a command as its console script would, and says which heavy packages came along.
PROBE = """
import json, sys
from supertuner.cli import main
sys.argv = ["supertuner", *sys.argv[1:]]
try:
    main()
finally:
    heavy = [n for n in ("torch", "pydantic", "numpy", "av", "PIL", "pyarrow", "datasets", "yaml") if n in sys.modules]
    sys.stderr.write("\\n" + json.dumps(heavy))
"""


def run(*arguments: str) -> tuple[float, subprocess.CompletedProcess[str], list[str]]:
    """(seconds from start to end, the finished process, heavy packages it had imported)."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    return seconds, done, json.loads(done.stderr.splitlines()[-1])


def best(rounds: int, *arguments: str) -> float:
    """The quickest of several: what the command needs when nobody else uses the machine."""
    return min(run(*arguments)[0] for _ in range(rounds))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "cats").mkdir()
    (folder / "cats" / "a.jpg").write_bytes(b"\xff\xd8")
    file = folder / "run.json"
    file.write_text(json.dumps({"datasets": [{"dataset_type": "image", "instance_data_dir": "cats"}]}))
    return file


def test_help_imports_nothing_heavy_and_takes_a_third_of_a_second() -> None:
    _, done, heavy = run("--help")
    assert done.returncode == 0 and "supertuner" in done.stdout
    assert heavy == []
    assert best(5, "--help") <= 0.3


def test_checking_a_configuration_imports_no_torch_and_takes_a_second(config: Path) -> None:
    _, done, heavy = run("config", "validate", str(config))
    assert done.returncode == 0, done.stderr
    assert "torch" not in heavy and "numpy" not in heavy
    assert best(3, "config", "validate", str(config)) <= 1.0
