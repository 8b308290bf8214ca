"""Some package reads every setting, and every configuration in `examples/` is valid."""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from supertuner.config.families import expert_names
from supertuner.config.settings.run_config import RunConfig
from supertuner.config.sources.load import load_config
from tests.architecture.code_rules import attribute_names

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    f
    for f in (ROOT / "config").iterdir()
    if f.suffix in (".json", ".yaml", ".yml", ".toml")
    and not f.name.endswith(".schema.json")
    and not f.name.startswith("accelerate_")  # the launcher's, not a run's
)


def settings(model: type[BaseModel]) -> list[str]:
    """Every setting of the tree, as `DatasetSettings.resolution`."""
    names = []
    for name, field in model.model_fields.items():
        blocks = blocks_of(field.annotation)
        names += [setting for block in blocks for setting in settings(block)]
        if not blocks:
            names.append(f"{model.__name__}.{name}")
    return names


def blocks_of(annotation: object) -> list[type[BaseModel]]:
    """The blocks that a field's type names, through tuples, unions and annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in typing.get_args(annotation) for block in blocks_of(argument)]


def unread(names: list[str], sources: list[str]) -> list[str]:
    """Settings that no source reads, as an attribute or, for settings of an expert, by `getattr` with its name."""
    read = set().union(*(attribute_names(source) | text_constants(source) for source in sources)) if sources else set()
    return [name for name in names if _without_expert(name.rsplit(".", 1)[1]) not in read]


def _without_expert(name: str) -> str:
    """`high_noise_lr` → `lr`, `single_file_low_noise` → `single_file`: read by their pattern."""
    return re.sub("|".join(f"{expert}_|_{expert}" for expert in expert_names()), "", name)


def text_constants(source: str) -> set[str]:
    """The text constants of a source, also those inside f-strings; leading underscores are removed."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {value.lstrip("_") for value in constants if isinstance(value, str) and value.lstrip("_").isidentifier()}


def test_every_setting_is_read_by_a_package_other_than_config() -> None:
    package = ROOT / "supertuner"
    readers = [file for file in package.rglob("*.py") if not file.is_relative_to(package / "config")]
    assert unread(settings(RunConfig), [file.read_text() for file in readers]) == []


def test_a_setting_that_nothing_reads_is_found() -> None:
    names = ["DatasetSettings.repeats", "DatasetSettings.weight"]
    assert unread(names, ["def f(dataset):\n    return dataset.repeats"]) == ["DatasetSettings.weight"]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_a_configuration_we_ship_is_valid(file: Path) -> None:
    assert load_config(file, check_paths=False, environ={}).config.datasets
