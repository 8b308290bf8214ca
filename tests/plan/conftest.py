"""Fixtures of the tests of `plan`."""

from tests.models.families.pipelines import tiny_wan, written

__all__ = ["tiny_wan", "written"]
