"""Sizes of a tiny Qwen-Image pipeline, its tokenizer and its vision-language text encoder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from supertuner.models.families.qwen_image.encoders import IMAGE_EDIT, TEXT_TO_IMAGE

SPECIAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
HEAD_DIM: Final = 8


@dataclass(frozen=True, slots=True)
class TinyQwen:
    layers: int = 2
    heads: int = 2
    text_width: int = 16
    vae_width: int = 8

    def assemble(self) -> QwenImagePipeline:
        tokenizer = build_tokenizer()
        return QwenImagePipeline(
            tokenizer=tokenizer,
            text_encoder=build_vision_language_encoder(tokenizer, self.text_width),
            vae=AutoencoderKLQwenImage(base_dim=self.vae_width, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval(),
            transformer=self._transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(  # as published with Qwen-Image
                base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02, use_dynamic_shifting=True
            ),
        )

    def _transformer(self) -> QwenImageTransformer2DModel:
        return QwenImageTransformer2DModel(
            num_layers=self.layers,
            attention_head_dim=16,
            num_attention_heads=self.heads,
            joint_attention_dim=self.text_width,
            axes_dims_rope=(4, 6, 6),
        ).eval()


def build_tokenizer() -> Qwen2Tokenizer:
    """Every word of the prompt templates is one token, as in the real tokenizer, so the templates have their real
    lengths. Other words become pieces of these words, or bytes."""
    ids = {piece: index for index, piece in enumerate((*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: dict[tuple[str, str], None] = {}
    for word in _template_words(TEXT_TO_IMAGE.template + IMAGE_EDIT.template):
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            ids.setdefault(word[: end + 1], len(ids))
    return Qwen2Tokenizer(
        vocab=ids,
        merges=list(merges),  # type: ignore[arg-type, unused-ignore]
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=131072,
    )


def build_vision_language_encoder(tokenizer: Qwen2Tokenizer, width: int) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    token_names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    token_names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in token_names.items()}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _template_words(text: str) -> list[str]:
    """The distinct words of a text in the byte alphabet, where Ġ is a space.

    Words with a leading space come first, because earlier merges are applied first: otherwise `Ġuser` would become a
    space and `user`.
    """
    plain = re.sub(r"<\|\w+\|>|\{\}", "\n", text)
    words = [word.replace(" ", "Ġ") for word in re.findall(r"'s| ?[A-Za-z]+| ?[^\sA-Za-z]+", plain)]
    return sorted(dict.fromkeys(words), key=lambda word: not word.startswith("Ġ"))
