"""Tiny pipelines on disk, each written once per session. A conftest of another room imports the fixtures it wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from supertuner.models.spec import Source
from supertuner.models.wan22_tiny import TinyWan, write


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Text to video, two experts."""
    return _wan(tmp_path_factory, TinyWan())


@pytest.fixture(scope="session")
def tiny_wan_image_to_video(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return _wan(tmp_path_factory, TinyWan(kind="i2v"))


@pytest.fixture(scope="session")
def tiny_wan_5b(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """One expert, a timestep per token."""
    return _wan(tmp_path_factory, TinyWan(kind="ti2v"))


def _wan(factory: pytest.TempPathFactory, sizes: TinyWan) -> Source:
    folder: Path = factory.mktemp("pipelines") / f"wan-{sizes.kind}"
    write(folder, sizes, seed=0)
    return Source(str(folder))
