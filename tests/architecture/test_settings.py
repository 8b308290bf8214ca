"""Every setting is read by some room or says that it waits for one, and every configuration we ship is valid."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

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


def settings(model: type[BaseModel], pending: bool = False) -> list[tuple[str, bool]]:
    """Every leaf of the tree as (`Dataset.resolution`, whether it or a block above it is marked as waiting)."""
    found = []
    for name, field in model.model_fields.items():
        waits = pending or is_pending(field)
        blocks = blocks_of(field.annotation)
        for block in blocks:
            found += settings(block, waits)
        if not blocks:
            found.append((f"{model.__name__}.{name}", waits))
    return found


def blocks_of(annotation: object) -> list[type[BaseModel]]:
    """The blocks that a field's type names, through tuples, unions and annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in typing.get_args(annotation) for block in blocks_of(argument)]


def is_pending(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and "pending" in field.json_schema_extra


def unread(leaves: list[tuple[str, bool]], sources: list[str]) -> list[str]:
    """Settings that no source reads as an attribute and that do not say they wait."""
    read = set().union(*(attribute_names(source) for source in sources)) if sources else set()
    return [path for path, pending in leaves if not pending and path.rsplit(".", 1)[1] not in read]


def test_every_setting_is_read_by_a_room_or_says_what_it_waits_for() -> None:
    package = ROOT / "supertuner"
    rooms = [f for f in package.rglob("*.py") if not f.is_relative_to(package / "config")]
    assert unread(settings(RunConfig), [f.read_text() for f in rooms]) == []


def test_a_setting_that_nothing_reads_is_found() -> None:
    leaves = [("Dataset.repeats", False), ("Dataset.weight", False), ("TrainSettings.max_steps", True)]
    assert unread(leaves, ["def f(dataset):\n    return dataset.repeats"]) == ["Dataset.weight"]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_a_configuration_we_ship_is_valid(file: Path) -> None:
    assert load_config(file, check_paths=False, environ={}).config.datasets
