"""Fixtures of the tests of `step`."""

from tests.models.families.pipelines import tiny_wan

__all__ = ["tiny_wan"]
