"""Trains the tiny Wan2.2 base model of the quickstart: draws chalk shapes, trains the VAE and both experts, and saves.

    nice .venv/bin/python scripts/pretrain_tiny.py --out assets/tiny-wan22

Equal seeds and numbers of threads give equal weights on the same kind of machine. The text encoder keeps its random
weights: its outputs for different words differ, which is all that the experts need.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

from supertuner.models.families.tiny_pipelines import umt5_encoder, unigram_tokenizer
from supertuner.tools import shapes

PARTS = ("vae", "transformer", "transformer_2")
BOUNDARY, SHIFT = 0.875, 3.0
CHANNELS, TEXT_WIDTH = 8, 64
WORDS = ("a", "an", *shapes.COLOURS, *shapes.SHAPES)
LONGEST_TEXT = 512
"""Length in tokens to which the real pipeline pads captions."""
SPREAD = 0.1
"""Standard deviation of the noise on latents while the VAE is trained; smaller differences are not distinguished."""
PART = 32
"""Side in pixels of the crops on which the VAE is trained."""
SHORT_TEXT = 6
"""Length in tokens of captions in this script; at least one token is padding."""
UNNAMED = 0.1
"""Share of samples with an empty caption, for guidance; the same share names no colour, and the same share names no
shape, so that each word gets its own meaning."""


@dataclass(frozen=True, slots=True)
class EncodedCaptions:
    """Every caption of the base model, encoded once; the first `lengths` of each row of `tokens` are not padding."""

    texts: tuple[str, ...]
    tokens: torch.Tensor
    lengths: torch.Tensor

    def row(self, text: str) -> int:
        return self.texts.index(text)


class MergedPaddingAttnProcessor(WanAttnProcessor):  # type: ignore[misc]
    """Attention to a short text that gives the result of a text padded to many tokens: many equal keys are equivalent
    to one key with a bias."""

    bias: torch.Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, rotary_emb)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to train; the others stay as they are"
    )
    parser.add_argument("--vae-steps", type=int, default=4000)
    parser.add_argument("--high-steps", type=int, default=2000)
    parser.add_argument("--low-steps", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    pipeline = build()
    if "vae" in options.parts:
        with flat_convolutions():
            train_vae(pipeline.vae, options.vae_steps, options.seed)
        save(pipeline, options.out, pipeline.components)
    pipeline.register_modules(vae=AutoencoderKLWan.from_pretrained(options.out, subfolder="vae").float())  # as stored
    drawn = shapes.random_drawings(shapes.chalk_pairs(), 160, Random(options.seed))
    with flat_convolutions():
        latents = encode(pipeline.vae, drawn)
    captions = encode_captions(pipeline)
    sigma_ranges = {"transformer": (BOUNDARY, 1.0), "transformer_2": (0.0, BOUNDARY)}
    steps = {"transformer": options.high_steps, "transformer_2": options.low_steps}
    for part in [part for part in options.parts if part in sigma_ranges]:
        model = getattr(pipeline, part)
        trained = train_expert(model, part, latents, drawn, captions, sigma_ranges[part], steps[part], options.seed)
        pipeline.register_modules(**{part: trained})
        save(pipeline, options.out, [part, "text_encoder", "tokenizer", "scheduler"])


def build() -> WanPipeline:
    """The untrained pipeline; its weights depend on torch's seed."""
    tokenizer = unigram_tokenizer(WORDS, LONGEST_TEXT)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=umt5_encoder(len(tokenizer), TEXT_WIDTH),
        vae=one_frame_at_a_time(
            AutoencoderKLWan(
                base_dim=8,
                z_dim=CHANNELS,
                dim_mult=[1, 2, 4, 4],
                num_res_blocks=1,
                latents_mean=[0.0] * CHANNELS,
                latents_std=[1.0] * CHANNELS,
            )
        ),
        transformer=expert(),
        transformer_2=expert(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=SHIFT
        ),
        boundary_ratio=BOUNDARY,
    )


def expert() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=256,
        num_layers=4,
        rope_max_seq_len=64,
    )


def one_frame_at_a_time(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Make kernels over time use only the newest frame: single pictures never train the other slices, which would stay
    random.

    The encoder's variance is made constant: at the start it would be larger than the signal in the latents.
    """
    with torch.no_grad():
        vae.quant_conv.weight[CHANNELS:] = 0
        vae.quant_conv.bias[CHANNELS:] = 2 * math.log(SPREAD)
        for name, module in vae.named_modules():
            if isinstance(module, nn.Conv3d) and module.kernel_size[0] > 1:
                module.weight[:, :, :-1] = 0
                if name.endswith("time_conv"):
                    same = torch.eye(module.in_channels).repeat(module.out_channels // module.in_channels, 1)
                    module.weight[:, :, -1, 0, 0] = same
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return vae


@contextmanager
def flat_convolutions() -> Iterator[None]:
    """Use only the newest slice of kernels over time for single frames: the same result in two thirds of the time."""
    whole = WanCausalConv3d.forward

    def flat(self: Any, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[2] != 1 or cache_x is not None or self.stride[0] != 1:
            return whole(self, x, cache_x)  # type: ignore[no-any-return]
        wide, _, high = self._padding[:3]
        out = nn.functional.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], (high, wide))
        return out.unsqueeze(2)

    WanCausalConv3d.forward = flat
    try:
        yield
    finally:
        WanCausalConv3d.forward = whole


def train_vae(vae: AutoencoderKLWan, steps: int, seed: int, batch: int = 16) -> None:
    """Train on shapes of all colours on any background, for most steps on crops; then store mean and standard deviation
    of the latents in the config."""
    random = Random(seed)
    pictures = pixels(shapes.render_drawings([any_drawing(random) for _ in range(6000)]))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    rng = torch.Generator().manual_seed(seed)
    vae.train()
    for step, rate in rates(steps, 4e-3, "vae"):
        optimizer.param_groups[0]["lr"] = rate
        wanted = pictures[torch.randint(len(pictures), (batch,), generator=rng)]
        if step < 0.75 * steps:
            top, left = torch.randint(shapes.SIDE_PIXELS - PART + 1, (2,), generator=rng).tolist()
            wanted = wanted[..., top : top + PART, left : left + PART]
        mean = vae.encode(wanted).latent_dist.mean
        got = vae.decode(mean + SPREAD * torch.randn(mean.shape, generator=rng)).sample
        away = (got - wanted).abs().mean() + 2 * (got - wanted).square().mean()
        descend(optimizer, away + 1e-3 * mean.square().mean(), vae)
        if step % 100 == 0:
            print(f"  vae {step}: {away.item():.4f}, latents {mean.std().item():.3f}", flush=True)
    vae.eval().requires_grad_(False)
    latents = encode(vae, shapes.random_drawings((*shapes.chalk_pairs(), *shapes.train_pairs()), 20, random))
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )


def any_drawing(random: Random) -> shapes.ShapeDrawing:
    """A drawing of a known colour on paper or on a random background."""
    shape, named = random.choice(shapes.SHAPES), random.choice(list(shapes.COLOURS))
    anything = (random.randrange(256), random.randrange(256), random.randrange(256))
    ground = random.choice([shapes.PAPER, shapes.PAPER, anything])
    centre = (random.uniform(0.4, 0.6), random.uniform(0.4, 0.6))
    return shapes.ShapeDrawing(named, shape, ground, centre, random.uniform(0.22, 0.38))


def train_expert(
    model: WanTransformer3DModel,
    name: str,
    latents: torch.Tensor,
    drawn: Sequence[shapes.ShapeDrawing],
    captions: EncodedCaptions,
    sigma_range: tuple[float, float],
    steps: int,
    seed: int,
    batch: int = 32,
) -> WanTransformer3DModel:
    """Flow matching on the sigmas of one expert. Returns a model with the averaged weights."""
    rng = torch.Generator().manual_seed(seed)
    named = torch.tensor([captions.row(drawing.caption) for drawing in drawn])
    no_colour = torch.tensor([captions.row(shapes.caption(drawing.shape)) for drawing in drawn])
    no_shape = torch.tensor([captions.row(shapes.caption(drawing.colour)) for drawing in drawn])
    padding = MergedPaddingAttnProcessor()
    for block in model.blocks:
        block.attn2.set_processor(padding)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    model.train()
    smoothed_loss = 0.0
    for step, rate in rates(steps, 2e-3, name):
        optimizer.param_groups[0]["lr"] = rate
        rows = torch.randint(len(latents), (batch,), generator=rng)
        kind = torch.rand(batch, generator=rng)
        words = torch.where(kind < 3 * UNNAMED, no_shape[rows], named[rows])
        words = torch.where(kind < 2 * UNNAMED, no_colour[rows], words)
        words = torch.where(kind < UNNAMED, captions.row(""), words)
        padded = round(math.exp(torch.rand(1, generator=rng).item() * math.log(LONGEST_TEXT / 8)) * 8)
        padding.bias = padding_bias(captions.lengths[words], padded)
        sigma = draw_sigmas(torch.rand(batch, generator=rng), sigma_range)
        clean, noise = latents[rows], torch.randn(latents[rows].shape, generator=rng)
        share = sigma.view(-1, 1, 1, 1, 1)
        guess = model((1 - share) * clean + share * noise, sigma * 1000, captions.tokens[words]).sample
        loss = (guess - (noise - clean)).square().mean()
        descend(optimizer, loss, model)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 / min(step + 1, 500))
        smoothed_loss += (loss.item() - smoothed_loss) / min(step + 1, 200)
        if step % 200 == 0:
            print(f"  {name} {step}: {smoothed_loss:.4f}", flush=True)
    for block in average.blocks:
        block.attn2.set_processor(WanAttnProcessor())
    return average.eval()


def draw_sigmas(uniform: torch.Tensor, sigma_range: tuple[float, float]) -> torch.Tensor:
    """Sigmas distributed as the sampler visits them: uniform times, shifted, in the expert's range."""
    low, high = (sigma / (SHIFT - (SHIFT - 1) * sigma) for sigma in sigma_range)
    times = low + (high - low) * uniform
    return SHIFT * times / (1 + (SHIFT - 1) * times)


def padding_bias(lengths: torch.Tensor, padded: int) -> torch.Tensor:
    """The attention bias that makes the few padding tokens of a short text equivalent to padding to `padded` tokens."""
    worth = torch.log((padded - lengths) / (SHORT_TEXT - lengths)).view(-1, 1)
    is_padding = torch.arange(SHORT_TEXT).view(1, -1) >= lengths.view(-1, 1)
    return torch.where(is_padding, worth, 0.0)[:, None, None, :]


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, module: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def rates(steps: int, peak: float, what: str) -> Iterator[tuple[int, float]]:
    """(step, learning rate) of each step: warm-up, then half a cosine. Prints the duration at the end."""
    began = time.monotonic()
    for step in range(steps):
        yield step, peak * min(1.0, (step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    print(f"{what}: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)


def pixels(pictures: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """NHWC bytes → NCFHW in [-1, 1] with one frame."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).unsqueeze(2).float() / 127.5 - 1


@torch.no_grad()
def encode(vae: AutoencoderKLWan, drawn: Sequence[shapes.ShapeDrawing]) -> torch.Tensor:
    """Latents of drawings, normalised with the VAE's mean and standard deviation."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    parts = [
        vae.encode(pixels(shapes.render_drawings(drawn[i : i + 64]))).latent_dist.mode()
        for i in range(0, len(drawn), 64)
    ]
    return (torch.cat(parts) - mean) / std


@torch.no_grad()
def encode_captions(pipeline: WanPipeline) -> EncodedCaptions:
    words = ((), *((word,) for word in (*shapes.SHAPES, *shapes.CHALKS)), *shapes.chalk_pairs())
    texts = tuple(shapes.caption(*some) if some else "" for some in words)
    tokens, _ = pipeline.encode_prompt(list(texts), do_classifier_free_guidance=False, max_sequence_length=SHORT_TEXT)
    lengths = torch.tensor([len(ids) for ids in pipeline.tokenizer(list(texts)).input_ids])
    assert int(lengths.max()) < SHORT_TEXT
    return EncodedCaptions(texts, tokens, lengths)


def save(pipeline: WanPipeline, folder: Path, parts: Collection[str]) -> None:
    """Save the named parts and the pipeline's index; weights in half precision, as for models on the hub."""
    for part in parts:
        component = getattr(pipeline, part)
        stored = copy.deepcopy(component).half() if part in PARTS else component
        stored.save_pretrained(folder / part)
    pipeline.save_config(folder)
    for name, key, value in (
        ("model_index.json", "tokenizer", ["transformers", "PreTrainedTokenizerFast"]),
        ("tokenizer/tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast"),
    ):  # a class name that both transformers 4 and 5 know
        described = json.loads((folder / name).read_text()) | {key: value}
        (folder / name).write_text(json.dumps(described, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"saved {', '.join(parts)} in {folder}: {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
