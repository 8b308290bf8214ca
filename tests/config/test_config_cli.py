"""`supertuner config` in its own process: what it prints and its exit codes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_RUNS = ("supertuner.schema.json", "accelerate_config_gh200.yaml")
EXAMPLES = sorted(p for p in (ROOT / "examples").iterdir() if p.is_file() and p.name not in NO_RUNS)
MAIN = "import sys; from supertuner.cli import main; sys.argv[0] = 'supertuner'; main()"


def supertuner(*arguments: object, cwd: Path = ROOT, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-c", MAIN, *map(str, arguments)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_validate_prints_every_problem_of_every_file_and_exits_with_2(tmp_path):
    (tmp_path / "a.json").write_text('{"train": {"batch_sizes": 1}, "run": {"seed": -1}}')
    (tmp_path / "b.yaml").write_text("run: {seed: 1}")
    done = supertuner("config", "validate", "a.json", "b.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "config error in a.json\n"
        "  train.batch_sizes: not a setting; did you mean batch_size?\n"
        "  run.seed: -1 is not allowed; allowed: a whole number of at least 0 below 9223372036854775808\n"
        "2 errors; nothing was started\n"
    )
    assert done.stdout == "b.yaml is valid: 0 datasets, 1 setting\n"


def cpu_seconds_of_children() -> float:
    """CPU time of finished child processes; unlike elapsed time it does not depend on the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_validate_takes_less_than_a_second_and_imports_no_torch():
    took = []
    for _ in range(3):
        begin = cpu_seconds_of_children()
        done = supertuner("config", "validate", "--no-paths", EXAMPLES[0], python=("-X", "importtime"))
        took.append(cpu_seconds_of_children() - begin)
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "supertuner.config.sources.load" in imported
    assert not imported & {"torch", "numpy", "av", "pyarrow", "PIL", "datasets", "simplejpeg"}
    assert min(took) < 1.0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_the_shipped_examples_are_valid(example):
    done = supertuner("config", "validate", "--no-paths", "--json", example)
    (report,) = json.loads(done.stdout)
    assert report["valid"], report


def test_without_no_paths_a_missing_folder_is_refused():
    done = supertuner("config", "validate", ROOT / "examples/captioned_images.yaml")
    assert done.returncode == 2
    assert 'datasets[0].instance_data_dir: "/workspace/datasets/portraits" is not a folder' in done.stderr


def test_the_files_of_the_forks_example_are_in_the_repository():
    done = supertuner("config", "validate", "examples/gh200_in_memory_example.json")
    assert done.returncode == 0, done.stderr


def test_show_origins_prints_the_origin_of_each_value(tmp_path):
    (tmp_path / "run.json").write_text('{"train_batch_size": 4}')
    done = supertuner("config", "show", "run.json", "--origins", "--set", "run.seed=3", cwd=tmp_path)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["run.seed", "=", "3", "--set", "run.seed=3"],
        ["train.batch_size", "=", "4", "run.json:", "train_batch_size", "(SimpleTuner)"],
    ]


def test_show_all_prints_defaults_too(tmp_path):
    done = supertuner("config", "show", "--all", "--origins", cwd=tmp_path)
    assert 'arena.verify = "on_demand"' in done.stdout
    assert all(line.endswith("default") for line in done.stdout.splitlines())


def test_convert_overwrites_only_with_force(tmp_path):
    (tmp_path / "run.json").write_text('{"train_batch_size": 4, "datasets": [{"instance_data_dir": "cats"}]}')
    (tmp_path / "out").mkdir()
    for expected in (0, 1):
        done = supertuner("config", "convert", "run.json", "-o", "out/run.yaml", cwd=tmp_path)
        assert done.returncode == expected
    assert "out/run.yaml exists; use --force" in done.stderr
    assert supertuner("config", "convert", "run.json", "-o", "out/run.yaml", "--force", cwd=tmp_path).returncode == 0
    text = (tmp_path / "out/run.yaml").read_text()
    assert text == 'datasets:\n- instance_data_dir: "../cats"\ntrain:\n  batch_size: 4\n'


def test_convert_to_standard_output_prints_only_the_file(tmp_path):
    (tmp_path / "run.json").write_text('{"train_batch_size": 4, "push_to_hub": true}')
    done = supertuner("config", "convert", "run.json", "--to", "toml", cwd=tmp_path)
    assert done.stdout == "[train]\nbatch_size = 4\n"
    assert "push_to_hub" in done.stderr


def test_schema_prints_the_committed_file():
    committed = (ROOT / "examples/supertuner.schema.json").read_text()
    assert supertuner("config", "schema").stdout == committed, (
        "run `supertuner config schema > examples/supertuner.schema.json`"
    )


def test_an_os_error_is_one_line_with_the_file_and_no_traceback(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    done = supertuner("config", "convert", "a.json", "-o", "/proc/b.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "/proc/" in done.stderr and "No such file" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_key_cannot_control_the_terminal(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"\x1b[2Jtrain": 1, "train": {"bat\x07ch": 2}, "datasets": []}))
    for command in ("validate", "show"):
        outcome = supertuner("config", command, str(file))
        assert outcome.returncode == 2
        assert "\\x1b[2Jtrain" in outcome.stderr and "bat\\x07ch" in outcome.stderr
        assert "\x1b" not in outcome.stderr + outcome.stdout and "\x07" not in outcome.stderr + outcome.stdout
