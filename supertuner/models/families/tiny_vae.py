"""The VAE of tiny pipelines of pictures: diffusers' AutoencoderKL at its smallest, with a family's own scale."""

from __future__ import annotations

from diffusers import AutoencoderKL


def tiny_image_vae(width: int, *, channels: int, scaling_factor: float, shift_factor: float | None) -> AutoencoderKL:
    """Eight pixels a latent. With a shift, as Flux and SD3 have it, there are no convolutions around the latents."""
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
