"""What tests of encoded data start from."""

from __future__ import annotations

import pytest

from tests.cache.encoding import tiny


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory):
    return tiny("wan2.2", tmp_path_factory.mktemp("model") / "wan")


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory):
    return tiny("flux", tmp_path_factory.mktemp("model") / "flux")
