"""The schema and the docs describe every setting in the same words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supertuner.config.dialects.key_tables import DATASET_KEYS, RUN_KEYS, inherited_keys
from supertuner.config.settings import key_paths
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig, json_schema
from supertuner.config.settings.values import format_value
from supertuner.config.sources.environment import SETTING_BY_VARIABLE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/configuration.md"


def test_every_field_of_the_schema_has_a_description():
    schema = json_schema()
    blocks = {"the root": schema, **schema["$defs"]}
    for name, block in blocks.items():
        for field, node in block.get("properties", {}).items():
            assert node.get("description", "").endswith((".", ".)")), f"{name}.{field}"


def test_every_block_of_the_schema_forbids_unknown_keys():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert all(b["additionalProperties"] is False for b in schema["$defs"].values() if "properties" in b)


def test_blocks_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().train.batch_size = 3  # type: ignore[misc]


def test_defaults_pass_their_own_checks():
    RunConfig.model_validate_json(RunConfig(datasets=(DatasetSettings(id="a"),)).model_dump_json(), strict=True)


def rows() -> list[str]:
    """The line of the docs for each setting: name, default, description."""
    schema = json_schema()
    lines = []
    for name, block in key_paths.blocks().items():
        properties = schema["$defs"].get(block.__name__, schema)["properties"]
        for field in key_paths.names_in_block(name):
            if f"{name}.{field}".lstrip(".") in key_paths.settings():
                default = properties[field].get("default")
                text = "" if default is None else f"`{format_value(default)}`"
                lines.append(f"| `{field}` | {text} | {' '.join(properties[field]['description'].split())} |")
    return lines


def test_the_docs_describe_every_setting_as_the_schema_does():
    lines = DOCS.read_text().splitlines()
    assert [row for row in rows() if row not in lines] == []


def test_the_docs_have_no_setting_that_does_not_exist():
    section = DOCS.read_text().split("## All settings")[1]
    known = rows()
    assert [line for line in section.splitlines() if line.startswith("| `") and line not in known] == []


def test_the_docs_list_every_variable_with_its_setting():
    text = DOCS.read_text()
    for variable, setting in SETTING_BY_VARIABLE.items():
        assert re.search(rf"\| `{variable}` \| `{re.escape(setting)}` \|", text), variable


def test_the_docs_list_every_dialect_key_that_has_an_effect():
    text = DOCS.read_text()
    missing = [row.key for row in (*RUN_KEYS, *DATASET_KEYS) if not row.reason and f"`{row.key}`" not in text]
    missing += [name for name in inherited_keys() if f"`{name}`" not in text]
    assert missing == []
