"""Makes the tiny Wan2.2 base model of the quickstart: draws chalk shapes, trains the VAE, then both experts, and saves.

    nice .venv/bin/python scripts/pretrain_tiny.py --out assets/tiny-wan22

One seed and one number of threads give one set of weights on one kind of machine. The text encoder stays as it was
drawn: its outputs for different words differ, and that is all the experts need of it.
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
"""Tokens that the real pipeline pads captions to."""
SPREAD = 0.1
"""Of the noise on latents while the VAE learns: what differs less is not told apart."""
PART = 32
"""Pixels of the side of a picture's part that the VAE learns from."""
SHORT_TEXT = 6
"""Tokens that captions take in here, at least one of them padding."""
UNNAMED = 0.1
"""Share of samples with an empty caption, for guidance; again with one that names no colour, and no shape: so that each
word comes to mean one thing."""


@dataclass(frozen=True, slots=True)
class EncodedCaptions:
    """Every caption of the base, encoded once: rows of `tokens`, of which the first `lengths` are not padding."""

    texts: tuple[str, ...]
    tokens: torch.Tensor
    lengths: torch.Tensor

    def row(self, text: str) -> int:
        return self.texts.index(text)


class MergedPaddingAttnProcessor(WanAttnProcessor):  # type: ignore[misc]
    """Attention to a short text with the result of a text padded to many tokens: equal keys add up to a bias."""

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
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--threads", type=int, default=1)
    ask.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="those to train; others are as they are")
    ask.add_argument("--vae-steps", type=int, default=4000)
    ask.add_argument("--high-steps", type=int, default=2000)
    ask.add_argument("--low-steps", type=int, default=4000)
    given = ask.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    pipeline = build()
    if "vae" in given.parts:
        with flat_convolutions():
            train_vae(pipeline.vae, given.vae_steps, given.seed)
        save(pipeline, given.out, pipeline.components)
    pipeline.register_modules(vae=AutoencoderKLWan.from_pretrained(given.out, subfolder="vae").float())  # as stored
    drawn = shapes.random_drawings(shapes.chalk_pairs(), 160, Random(given.seed))
    with flat_convolutions():
        latents = encode(pipeline.vae, drawn)
    captions = encode_captions(pipeline)
    levels = {"transformer": (BOUNDARY, 1.0), "transformer_2": (0.0, BOUNDARY)}
    steps = {"transformer": given.high_steps, "transformer_2": given.low_steps}
    for part in [part for part in given.parts if part in levels]:
        model = getattr(pipeline, part)
        trained = train_expert(model, part, latents, drawn, captions, levels[part], steps[part], given.seed)
        pipeline.register_modules(**{part: trained})
        save(pipeline, given.out, [part, "text_encoder", "tokenizer", "scheduler"])


def build() -> WanPipeline:
    """The untrained pipeline. Weights come from torch's seed."""
    tokenizer = unigram_tokenizer(WORDS, LONGEST_TEXT)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=umt5_encoder(len(tokenizer), TEXT_WIDTH, 1),
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
    """Kernels over time see only the newest frame: pictures never train the rest, which would stay random.

    The encoder's own spread is made constant: at the start it would drown what the latents say.
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
    """A single frame needs only the newest slice of a kernel over time: the same result in two thirds of the time."""
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
    """On shapes of any colour on any ground, most of the time on parts of pictures; then the config gets the latents'
    mean and spread."""
    random = Random(seed)
    pictures = pixels(shapes.render_drawings([any_drawing(random) for _ in range(6000)]))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    chance = torch.Generator().manual_seed(seed)
    vae.train()
    for step, rate in rates(steps, 4e-3, "vae"):
        optimizer.param_groups[0]["lr"] = rate
        wanted = pictures[torch.randint(len(pictures), (batch,), generator=chance)]
        if step < 0.75 * steps:
            top, left = torch.randint(shapes.SIDE_PIXELS - PART + 1, (2,), generator=chance).tolist()
            wanted = wanted[..., top : top + PART, left : left + PART]
        mean = vae.encode(wanted).latent_dist.mean
        got = vae.decode(mean + SPREAD * torch.randn(mean.shape, generator=chance)).sample
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
    """A drawing of a known colour, on paper or on any ground."""
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
    levels: tuple[float, float],
    steps: int,
    seed: int,
    batch: int = 32,
) -> WanTransformer3DModel:
    """Flow matching on the levels of one expert. What is returned has the average of the weights."""
    chance = torch.Generator().manual_seed(seed)
    named = torch.tensor([captions.row(one.caption) for one in drawn])
    no_colour = torch.tensor([captions.row(shapes.caption(one.shape)) for one in drawn])
    no_shape = torch.tensor([captions.row(shapes.caption(one.colour)) for one in drawn])
    padding = MergedPaddingAttnProcessor()
    for block in model.blocks:
        block.attn2.set_processor(padding)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    model.train()
    told = 0.0
    for step, rate in rates(steps, 2e-3, name):
        optimizer.param_groups[0]["lr"] = rate
        rows = torch.randint(len(latents), (batch,), generator=chance)
        kind = torch.rand(batch, generator=chance)
        words = torch.where(kind < 3 * UNNAMED, no_shape[rows], named[rows])
        words = torch.where(kind < 2 * UNNAMED, no_colour[rows], words)
        words = torch.where(kind < UNNAMED, captions.row(""), words)
        padded = round(math.exp(torch.rand(1, generator=chance).item() * math.log(LONGEST_TEXT / 8)) * 8)
        padding.bias = padding_bias(captions.lengths[words], padded)
        level = draw_levels(torch.rand(batch, generator=chance), levels)
        clean, noise = latents[rows], torch.randn(latents[rows].shape, generator=chance)
        share = level.view(-1, 1, 1, 1, 1)
        guess = model((1 - share) * clean + share * noise, level * 1000, captions.tokens[words]).sample
        loss = (guess - (noise - clean)).square().mean()
        descend(optimizer, loss, model)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 / min(step + 1, 500))
        told += (loss.item() - told) / min(step + 1, 200)
        if step % 200 == 0:
            print(f"  {name} {step}: {told:.4f}", flush=True)
    for block in average.blocks:
        block.attn2.set_processor(WanAttnProcessor())
    return average.eval()


def draw_levels(uniform: torch.Tensor, levels: tuple[float, float]) -> torch.Tensor:
    """As often as the sampler visits them: uniform times, shifted, in the expert's range."""
    low, high = (level / (SHIFT - (SHIFT - 1) * level) for level in levels)
    times = low + (high - low) * uniform
    return SHIFT * times / (1 + (SHIFT - 1) * times)


def padding_bias(lengths: torch.Tensor, padded: int) -> torch.Tensor:
    """What the few padding tokens of the short texts are worth when there are `padded` tokens in all."""
    worth = torch.log((padded - lengths) / (SHORT_TEXT - lengths)).view(-1, 1)
    is_padding = torch.arange(SHORT_TEXT).view(1, -1) >= lengths.view(-1, 1)
    return torch.where(is_padding, worth, 0.0)[:, None, None, :]


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, module: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def rates(steps: int, peak: float, what: str) -> Iterator[tuple[int, float]]:
    """Steps with their learning rates: warm-up, then half a cosine. Tells how long it took."""
    began = time.monotonic()
    for step in range(steps):
        yield step, peak * min(1.0, (step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    print(f"{what}: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)


def pixels(pictures: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """NHWC bytes → NCFHW from -1 to 1, of one frame."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).unsqueeze(2).float() / 127.5 - 1


@torch.no_grad()
def encode(vae: AutoencoderKLWan, drawn: Sequence[shapes.ShapeDrawing]) -> torch.Tensor:
    """Latents of drawings, by the VAE's mean and spread."""
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
    """The named parts, and the pipeline's index; weights in half precision, as models on the hub are."""
    for part in parts:
        component = getattr(pipeline, part)
        stored = copy.deepcopy(component).half() if part in PARTS else component
        stored.save_pretrained(folder / part)
    pipeline.save_config(folder)
    for name, key, value in (
        ("model_index.json", "tokenizer", ["transformers", "PreTrainedTokenizerFast"]),
        ("tokenizer/tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast"),
    ):  # the name that transformers 4 and 5 both know
        described = json.loads((folder / name).read_text()) | {key: value}
        (folder / name).write_text(json.dumps(described, indent=2) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"saved {', '.join(parts)} in {folder}: {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
