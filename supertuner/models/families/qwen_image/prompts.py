"""What Qwen-Image tells its text encoder around a caption, and how much of the answer is only about that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    template: str
    prefix_tokens: int
    """Tokens at the beginning that are the same for every caption, and that the denoiser does not see."""
    max_caption_tokens: int | None
    """Tokens behind them that the denoiser is given at most; None: all there are."""

    def with_caption(self, caption: str) -> str:
        return self.template.replace("{}", caption)


TEXT_TO_IMAGE: Final = PromptTemplate(
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    prefix_tokens=34,
    max_caption_tokens=512,
)
IMAGE_EDIT: Final = PromptTemplate(
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n",
    prefix_tokens=64,
    max_caption_tokens=None,
)
