"""The fixtures of these tests: tiny pipelines on disk."""

from tests.models.families.pipelines import tiny_wan, tiny_wan_image_to_video

__all__ = ["tiny_wan", "tiny_wan_image_to_video"]
