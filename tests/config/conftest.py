"""Fixtures that write a configuration into a temporary folder and load it with an empty environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from supertuner.config.sources.load import LoadedConfig, load_config
from supertuner.core.errors import ConfigError

Load = Callable[..., LoadedConfig]
Refuse = Callable[..., list[str]]


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """`load_text("a: 1", "run.yaml")`; a mapping is written as JSON."""

    def run(content: str | bytes | Mapping[str, Any], name: str = "run.json", **options: Any) -> LoadedConfig:
        if isinstance(content, Mapping):
            content = json.dumps(content)
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_config(path, **{"environ": {}, "check_paths": False, **options})

    return run


@pytest.fixture
def refuse(load_text: Load) -> Refuse:
    """The problems, as text, of a configuration that must be refused."""

    def run(*arguments: Any, **options: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_text(*arguments, **options)
        return [str(problem) for problem in caught.value.problems]

    return run
