"""Tiny random pipelines: how a family's record of sizes becomes a folder, and the components that families share.

The components are instances of the real classes, a few kilobytes each, built in code. Their tokenizers accept any text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from diffusers import AutoencoderKL
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from supertuner.models.library_logging import quiet_libraries

VOCABULARY: Final = (
    "a", "an", "the", "of", "on", "in", "and", "with", "at", "to", "from", "is", "large", "small", "big", "tiny", "red",
    "green", "blue", "yellow", "orange", "purple", "pink", "white", "black", "grey", "brown", "cyan", "circle",
    "square", "triangle", "star", "cross", "ring", "shape", "shapes", "moving", "still", "left", "right", "up", "down",
    "top", "bottom", "background", "dark", "light", "bright", "photo", "picture", "video",
)  # fmt: skip
_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,'-"


class TinyPipelineSizes(Protocol):
    """The sizes of one family's tiny pipeline, for example `TinyFlux`.

    Everything that the mathematics depends on (channels, packing, shifts, tables) is as in the published models; only
    widths and depths are small.
    """

    def assemble(self) -> Any:
        """A diffusers pipeline whose weights come from torch's global generator, in a fixed order."""


def build_pipeline(sizes: TinyPipelineSizes, seed: int) -> Any:
    """The pipeline in memory. The same seed gives the same weights; torch's global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sizes.assemble()


def write_pipeline(sizes: TinyPipelineSizes, folder: Path, seed: int) -> None:
    """Save `build_pipeline(sizes, seed)` in a new folder with the layout of repositories on the hub."""
    with quiet_libraries():
        build_pipeline(sizes, seed).save_pretrained(folder)


def unigram_tokenizer(words: Sequence[str] = VOCABULARY, max_length: int = 512) -> PreTrainedTokenizerFast:
    """A tokenizer like T5's: pieces with a leading bar, `</s>` at the end, padding id 0.

    Unknown words become letters, and unknown letters become bytes, so two different captions never get equal tokens.
    """
    pieces: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("▁", -6.0), *((f"▁{word}", -2.0) for word in words)]
    pieces += [(character, -8.0) for character in _CHARACTERS]
    tokenizer: Any = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    bar: dict[str, Any] = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**bar)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(**bar)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=max_length
    )


def byte_tokenizer(max_length: int = 77) -> PreTrainedTokenizerFast:
    """A tokenizer like CLIP's: a start token and an end token, which also pads. Here every piece is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: index for index, piece in enumerate([*alphabet, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer: Any = Tokenizer(models.BPE(ids, [], unk_token="<|endoftext|>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens_ids = [(token, ids[token]) for token in ("<|startoftext|>", "<|endoftext|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[special_tokens_ids[0][0], "$A", special_tokens_ids[1][0]],
        pair=[special_tokens_ids[0][0], "$A", "$B", special_tokens_ids[1][0]],
        special_tokens=special_tokens_ids,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=max_length,
    )


def clip_encoder(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> CLIPTextModel:
    return CLIPTextModel(_clip_config(tokenizer, width, layers)).eval()


def clip_encoder_with_projection(
    tokenizer: PreTrainedTokenizerFast, width: int, layers: int
) -> CLIPTextModelWithProjection:
    """Like `clip_encoder`, with a projection after the pooled output."""
    return CLIPTextModelWithProjection(_clip_config(tokenizer, width, layers)).eval()


def _clip_config(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 8),
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def umt5_encoder(vocab_size: int, width: int, layers: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(vocab_size, width, layers))).eval()


def t5_encoder(vocab_size: int, width: int, layers: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_sizes(vocab_size, width, layers))).eval()


def _t5_sizes(vocab_size: int, width: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": layers,
        "num_heads": max(1, width // 8),
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    }


def tiny_image_vae(width: int, *, channels: int, scaling_factor: float, shift_factor: float | None) -> AutoencoderKL:
    """A small AutoencoderKL that maps 8×8 pixels to one latent.

    With a shift factor it has no quantization convolutions, as in Flux and SD3.
    """
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[width] * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=shift_factor is None,
        use_post_quant_conv=shift_factor is None,
    ).eval()
