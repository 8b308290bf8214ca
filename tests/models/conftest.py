"""Fixtures of the tests of `models`."""

from tests.models.families.pipelines import tiny_flux, tiny_wan, tiny_wan_5b, tiny_wan_image_to_video, written

__all__ = ["tiny_flux", "tiny_wan", "tiny_wan_5b", "tiny_wan_image_to_video", "written"]
