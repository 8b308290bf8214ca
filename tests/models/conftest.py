"""The fixtures of this room."""

from tests.models.pipelines import tiny_wan, tiny_wan_5b, tiny_wan_image_to_video

__all__ = ["tiny_wan", "tiny_wan_5b", "tiny_wan_image_to_video"]
