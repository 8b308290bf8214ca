"""Tiny random pipelines: how a family's function becomes a folder, and the components that families share.

The components are instances of the real classes, a few kilobytes each, built in code. Their tokenizers accept any text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from diffusers import AutoencoderKL
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from supertuner.core.permissions import follow_umask
from supertuner.models.library_guards import quiet_libraries

VOCABULARY: Final = (
    "a", "an", "the", "of", "on", "in", "and", "with", "at", "to", "from", "is", "large", "small", "big", "tiny", "red",
    "green", "blue", "yellow", "orange", "purple", "pink", "white", "black", "grey", "brown", "cyan", "circle",
    "square", "triangle", "star", "cross", "ring", "shape", "shapes", "moving", "still", "left", "right", "up", "down",
    "top", "bottom", "background", "dark", "light", "bright", "photo", "picture", "video",
)  # fmt: skip
_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789.,'-"


def build_pipeline(assemble: Callable[[], Any], seed: int) -> Any:
    """The diffusers pipeline that `assemble` builds, for example `tiny_flux_pipeline`: weights come from torch's global
    generator, in a fixed order. The same seed gives the same weights; torch's global random state does not change.

    Everything that the mathematics depends on (channels, packing, shifts, tables) is as in the published models; only
    widths and depths are small.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return assemble()


def write_pipeline(assemble: Callable[[], Any], folder: Path, seed: int) -> None:
    """Save `build_pipeline(assemble, seed)` in a new folder with the layout of repositories on the hub."""
    with quiet_libraries():
        build_pipeline(assemble, seed).save_pretrained(folder)
    follow_umask(folder)


def unigram_tokenizer(words: Sequence[str] = VOCABULARY, max_length: int = 512) -> transformers.PreTrainedTokenizerFast:
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=max_length
    )


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer like CLIP's: a start token and an end token, which also pads. Here every piece is one byte."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    ids = {piece: index for index, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), start, end])}
    tokenizer: Any = Tokenizer(models.BPE(ids, [], unk_token=end))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[start, "$A", end], pair=[start, "$A", "$B", end], special_tokens=[(start, ids[start]), (end, ids[end])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, eos_token=end, pad_token=end, model_max_length=77
    )


def clip_encoder(
    tokenizer: transformers.PreTrainedTokenizerFast, width: int, layers: int, encoder: Any = transformers.CLIPTextModel
) -> transformers.CLIPTextModel | transformers.CLIPTextModelWithProjection:
    """`encoder` is the class; `CLIPTextModelWithProjection` has a projection after the pooled output."""
    config = transformers.CLIPTextConfig(
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
    return encoder(config).eval()


def umt5_encoder(vocab_size: int, width: int) -> transformers.UMT5EncoderModel:
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_sizes(vocab_size, width))).eval()


def t5_encoder(vocab_size: int, width: int) -> transformers.T5EncoderModel:
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_sizes(vocab_size, width))).eval()


def _t5_sizes(vocab_size: int, width: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "d_model": width, "d_kv": 8, "d_ff": 2 * width, "num_layers": 1}
    return {**sizes, "num_heads": max(1, width // 8), "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}


def tiny_image_vae(*, channels: int, scaling_factor: float, shift_factor: float | None) -> AutoencoderKL:
    """A small AutoencoderKL that maps 8×8 pixels to one latent.

    With a shift factor it has no quantization convolutions, as in Flux and SD3.
    """
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8] * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=channels,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=shift_factor is None,
        use_post_quant_conv=shift_factor is None,
    ).eval()
