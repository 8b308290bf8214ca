"""Tiny models for tests of encoded data."""

from __future__ import annotations

import pytest

from tests.train.encoding.encoding_helpers import tiny


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory):
    return tiny("wan2.2", tmp_path_factory.mktemp("model") / "wan")


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory):
    return tiny("flux", tmp_path_factory.mktemp("model") / "flux")
