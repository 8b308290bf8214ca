"""The fixtures of this room."""

from tests.models.pipelines import tiny_wan

__all__ = ["tiny_wan"]
