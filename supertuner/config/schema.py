"""The JSON Schema of a configuration file, for editors: every setting with its description, type and bounds."""

from __future__ import annotations

import json
from typing import Any

from supertuner.config.settings.run_config import RunConfig


def json_schema() -> dict[str, Any]:
    """The schema of the canonical form. Dialects are not part of it: editors should lead to our own names."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "SuperTuner configuration"
    schema["properties"]["$schema"] = {"type": "string", "description": "Where editors find this schema."}
    return {name: _without_titles(node) if name != "title" else node for name, node in schema.items()}


def json_schema_text() -> str:
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _without_titles(node: Any) -> Any:
    """Without titles, which pydantic makes of names and which say nothing new; with a word on who will read it."""
    if isinstance(node, dict):
        if "pending" in node:
            node = {**node, "description": f"{node['description']} (Nothing reads it until {node['pending']} lands.)"}
        return {
            name: _without_titles(inner)
            for name, inner in node.items()
            if name != "title" or not isinstance(inner, str)
        }
    return [_without_titles(inner) for inner in node] if isinstance(node, list) else node
