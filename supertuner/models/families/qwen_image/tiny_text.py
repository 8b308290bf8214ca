"""Qwen's tokenizer and its text encoder that also sees pictures, in a few kilobytes: real classes, small sizes."""

from __future__ import annotations

import re
from typing import Final

from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from supertuner.models.families.qwen_image.prompts import IMAGE_EDIT, TEXT_TO_IMAGE

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
HEAD_DIM: Final = 8


def build_tokenizer() -> Qwen2Tokenizer:
    """Every word of the prompts' templates is one token, as in the real one, and so their lengths are the real ones;
    anything else is pieces of them and bytes."""
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


def build_vision_language_encoder(tokenizer_to_embed: Qwen2Tokenizer, width: int) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer_to_embed),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6},
        "bos_token_id": None,
        "eos_token_id": tokenizer_to_embed.eos_token_id,
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
    ids = {f"{name}_token_id": tokenizer_to_embed.convert_tokens_to_ids(token) for name, token in token_names.items()}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _template_words(text: str) -> list[str]:
    """In the alphabet of bytes, where Ġ is a space; each once. Those with a space come first, for the first pieces are
    joined first: `Ġuser` would else become a space and `user`."""
    plain = re.sub(r"<\|\w+\|>|\{\}", "\n", text)
    words = [word.replace(" ", "Ġ") for word in re.findall(r"'s| ?[A-Za-z]+| ?[^\sA-Za-z]+", plain)]
    return sorted(dict.fromkeys(words), key=lambda word: not word.startswith("Ġ"))
