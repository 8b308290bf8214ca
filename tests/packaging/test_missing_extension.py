"""A checkout without its compiled extensions is told at the start of the suite, not by failures of many tests."""

from __future__ import annotations

import re

import pytest

from tests import conftest
from tests.train.runs import ROOT


def test_a_missing_compiled_extension_ends_the_suite_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "EXTENSIONS", (*conftest.EXTENSIONS, "core._absent"))
    with pytest.raises(pytest.UsageError, match=r"^not compiled here: core\._absent; run `make setup`"):
        conftest.pytest_configure()


def test_every_extension_of_the_build_is_looked_for() -> None:
    built = re.findall(r'"supertuner\.([\w.]+)",', (ROOT / "setup.py").read_text())
    assert sorted(built) == sorted(conftest.EXTENSIONS)
