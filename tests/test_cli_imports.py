"""The command line starts fast: --help and `config validate` import no torch. `make bench BENCH=start` measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Runs a command as its console script would, and prints which heavy packages were imported.
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


def run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """(finished process, heavy packages that it imported)."""
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
    return done, json.loads(done.stderr.splitlines()[-1])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "cats").mkdir()
    (folder / "cats" / "a.jpg").write_bytes(b"\xff\xd8")
    file = folder / "run.json"
    file.write_text(json.dumps({"datasets": [{"dataset_type": "image", "instance_data_dir": "cats"}]}))
    return file


def test_help_imports_nothing_heavy() -> None:
    done, heavy = run("--help")
    assert done.returncode == 0 and "supertuner" in done.stdout
    assert heavy == []


def test_validating_a_configuration_imports_no_torch(config: Path) -> None:
    done, heavy = run("config", "validate", str(config))
    assert done.returncode == 0, done.stderr
    assert "torch" not in heavy and "numpy" not in heavy


def test_listing_models_imports_no_torch() -> None:
    done, heavy = run("models", "--machine", "gh200-96")
    assert done.returncode == 0, done.stderr
    assert "torch" not in heavy
