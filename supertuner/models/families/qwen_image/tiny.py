"""Sizes of a tiny Qwen-Image pipeline, its tokenizer and its vision-language text encoder."""

from __future__ import annotations

import re
from typing import Final

import diffusers
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from supertuner.models.families.qwen_image.encoders import IMAGE_EDIT, TEXT_TO_IMAGE

SPECIAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
TEXT_WIDTH: Final = 16


def tiny_qwen_pipeline() -> diffusers.QwenImagePipeline:
    tokenizer = _tokenizer()
    return diffusers.QwenImagePipeline(
        tokenizer=tokenizer,
        text_encoder=_vision_language_encoder(tokenizer),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval(),
        transformer=diffusers.QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 6, 6),
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(  # as published with Qwen-Image
            base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02, use_dynamic_shifting=True
        ),
    )


def _tokenizer() -> Qwen2Tokenizer:
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


def _vision_language_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "fullatt_block_indexes": [0]}
    vision["out_hidden_size"] = TEXT_WIDTH
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}
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
