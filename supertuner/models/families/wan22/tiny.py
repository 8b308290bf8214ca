"""Sizes of tiny Wan2.2 pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)

from supertuner.models.families.tiny_pipelines import VOCABULARY, umt5_encoder, unigram_tokenizer

TinyWanKind = Literal["t2v", "i2v", "ti2v"]


@dataclass(frozen=True, slots=True)
class TinyWan:
    kind: TinyWanKind = "t2v"
    """Text-to-video, image-to-video (the first frame beside the latents), or like the 5B: one expert, a VAE with stride
    16."""
    experts: Literal[1, 2] = 2
    """Ignored for `ti2v`, which has one."""
    layers: int = 2
    heads: int = 2
    head_dim: int = 12
    """A multiple of 6: a third each for time, height and width."""
    ffn_dim: int = 48
    text_width: int = 16
    text_layers: int = 1
    words: tuple[str, ...] = VOCABULARY
    """Words that are one token each."""
    vae_width: int = 8
    vae_blocks: int = 1
    latents_mean: tuple[float, ...] | None = None
    """Means of the VAE's latents, one per channel; None: those of the published VAE."""
    latents_std: tuple[float, ...] | None = None
    flow_shift: float = 3.0

    def __post_init__(self) -> None:
        assert self.head_dim % 6 == 0, f"head_dim {self.head_dim} is not a multiple of 6"

    @property
    def boundary(self) -> float | None:
        if self.kind == "ti2v" or self.experts == 1:
            return None
        return 0.9 if self.kind == "i2v" else 0.875

    @property
    def channels(self) -> int:
        """Channels of the VAE's latents."""
        return 48 if self.kind == "ti2v" else 16

    def assemble(self) -> WanPipeline | WanImageToVideoPipeline:
        tokenizer = unigram_tokenizer(self.words)
        components: dict[str, Any] = {
            "tokenizer": tokenizer,
            "text_encoder": umt5_encoder(len(tokenizer), self.text_width, self.text_layers),
            "vae": self._vae(),
            "transformer": self._transformer(),
            "transformer_2": self._transformer() if self.boundary is not None else None,
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction",
                use_flow_sigmas=True,
                num_train_timesteps=1000,
                flow_shift=self.flow_shift,
            ),
            "boundary_ratio": self.boundary,
            "expand_timesteps": self.kind == "ti2v",
        }
        if self.kind == "i2v":
            return WanImageToVideoPipeline(**components, image_encoder=None, image_processor=None)
        return WanPipeline(**components)

    def _vae(self) -> AutoencoderKLWan:
        vae_config: dict[str, Any] = {
            "base_dim": self.vae_width,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": self.vae_blocks,
            "z_dim": self.channels,
        }
        if self.kind == "ti2v":
            vae_config |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
            vae_config |= {"scale_factor_spatial": 16, "decoder_base_dim": self.vae_width}
            vae_config |= {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
        if self.latents_mean is not None:
            vae_config["latents_mean"] = list(self.latents_mean)
        if self.latents_std is not None:
            vae_config["latents_std"] = list(self.latents_std)
        return AutoencoderKLWan(**vae_config).eval()

    def _transformer(self) -> WanTransformer3DModel:
        channels = self.channels
        return WanTransformer3DModel(
            num_attention_heads=self.heads,
            attention_head_dim=self.head_dim,
            in_channels=2 * channels + 4 if self.kind == "i2v" else channels,
            out_channels=channels,
            text_dim=self.text_width,
            freq_dim=32,
            ffn_dim=self.ffn_dim,
            num_layers=self.layers,
        ).eval()
