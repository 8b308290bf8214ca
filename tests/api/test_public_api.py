"""The names of `supertuner`: loaded lazily, complete, and typed; `train` and `plan` are functions and packages."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import supertuner as st

IMPORT_LIMIT_S = 0.1
IMPORT = """
import json, sys, time
before = set(sys.modules)
started = time.perf_counter()
import supertuner
seconds = time.perf_counter() - started
print(json.dumps([seconds, sorted(name.partition(".")[0] for name in set(sys.modules) - before)]))
"""


def import_alone() -> tuple[float, list[str]]:
    """Seconds of `import supertuner` in a new process, and the packages that it imported."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    seconds, packages = json.loads(done.stdout)
    return seconds, packages


def test_importing_the_package_is_fast_and_imports_no_torch() -> None:
    runs = [import_alone() for _ in range(3)]
    assert min(seconds for seconds, _ in runs) < IMPORT_LIMIT_S
    for _, packages in runs:
        assert not {"torch", "numpy", "pydantic"} & set(packages)


def test_every_public_name_exists_and_is_listed() -> None:
    assert dir(st) == sorted(st.__all__)
    for name in st.__all__:
        assert getattr(st, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    for module in (st, st.data, st.memory):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing


@pytest.mark.parametrize("name", ["train", "plan"])
def test_functions_named_like_a_package_are_both(name: str) -> None:
    """Importing a module of the package binds its name in `supertuner`, and the function must survive that."""
    import supertuner.plan.forecast.results
    import supertuner.train.signals

    value = getattr(st, name)
    assert callable(value)
    assert "config" in inspect.signature(value).parameters
    assert value is sys.modules[f"supertuner.{name}"]
    assert supertuner.train.signals.TrainingSignals and supertuner.plan.forecast.results.RunForecast


def test_type_checkers_see_the_annotations() -> None:
    assert (Path(st.__file__).parent / "py.typed").is_file()


def test_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "supertuner", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"supertuner {st.__version__}" == "supertuner 0.2.0"
