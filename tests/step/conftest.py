"""The fixtures of this room."""

from tests.models.families.pipelines import tiny_wan

__all__ = ["tiny_wan"]
