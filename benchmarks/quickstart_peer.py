"""The quickstart's training as a plain loop with diffusers and peft: the peer of `make baseline-check`.

It reads the same pictures, trains LoRA of the same rank on the same layers of the same experts, and processes as many
samples in each step; all data are in memory. Its argument is the file of a `MeasurementRequest`
(supertuner.tools.baseline.record), and it takes turns with SuperTuner. Its times and memory are compared, its losses
not.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from supertuner.tools.baseline.job import package_versions, peak_resident_memory
from supertuner.tools.baseline.record import MeasuredJob, read_request, write_job
from supertuner.tools.baseline.recorder import MeasurementRecorder

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
TRAIN_STEPS = 1000
BATCH = 32
"""Pictures per VAE call."""


def main(file: str) -> int:
    request = read_request(Path(file))
    recorder = MeasurementRecorder(request.begun, request.turn_steps)
    settings = json.loads(Path(request.config).read_bytes())
    train(settings, Path(request.config).parent, request.schedule, recorder)
    job = MeasuredJob(
        steps=tuple(recorder.steps),
        start=recorder.startup_times(),
        peaks=peak_resident_memory(),
        hints={},
        memory=(),
        losses="",
        versions=package_versions(),
        code=__file__,
        seconds=time.monotonic() - request.begun,
    )
    write_job(Path(request.out), job)
    return 0


def train(
    settings: dict[str, Any], folder: Path, schedule: tuple[tuple[int, str], ...], recorder: MeasurementRecorder
) -> None:
    import torch
    from diffusers import WanPipeline
    from peft import LoraConfig

    pipe = WanPipeline.from_pretrained(settings["model"]["path"], torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    rank, batch, clip = settings["adapter"]["rank"], settings["train"]["batch_size"], settings["train"]["max_grad_norm"]
    latents, texts = encoded(pipe, folder / settings["datasets"][0]["instance_data_dir"])
    experts = {"high_noise": pipe.transformer, "low_noise": pipe.transformer_2}
    boundary, trained = pipe.config.boundary_ratio, {}
    for name, expert in experts.items():
        expert.requires_grad_(False)
        expert.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))
        weights = [weight for weight in expert.parameters() if weight.requires_grad]
        trained[name] = (weights, torch.optim.AdamW(weights, lr=settings["optimizer"]["learning_rate"], fused=True))
    recorder.begin_training(time.monotonic())
    for window, name in schedule:
        begun = time.perf_counter()
        weights, optimizer = trained[name]
        loss = 0.0
        for at in range(0, window, batch):
            count = min(batch, window - at)
            rows = torch.randint(len(latents), (count,))
            clean, noise = latents[rows], torch.randn((count, *latents.shape[1:]))
            share = torch.sigmoid(torch.randn(count))
            sigma = boundary + (1 - boundary) * share if name == "high_noise" else boundary * share
            mixed = sigma.view(-1, 1, 1, 1, 1)
            predicted = experts[name](
                hidden_states=(1 - mixed) * clean + mixed * noise,
                timestep=sigma * TRAIN_STEPS,
                encoder_hidden_states=texts[rows],
                return_dict=False,
            )[0]
            each = (predicted - (noise - clean)).square().flatten(1).mean(1)
            (each.sum() / window).backward()
            loss += float(each.detach().sum())
        torch.nn.utils.clip_grad_norm_(weights, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.record_step(window=window, expert=name, loss=loss / window, seconds=time.perf_counter() - begun)


def encoded(pipe: Any, folder: Path) -> tuple[Any, Any]:
    """Latents and text embeddings of every picture and caption."""
    import numpy as np
    import torch
    from PIL import Image

    shape = (1, pipe.vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(pipe.vae.config.latents_mean).view(shape)
    std = torch.tensor(pipe.vae.config.latents_std).view(shape)
    files = sorted(folder.glob("*.png"))
    captions = [file.with_suffix(".txt").read_text().strip() for file in files]
    with torch.no_grad():
        latents = []
        for at in range(0, len(files), BATCH):
            pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files[at : at + BATCH]])
            video = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()[:, :, None] / 127.5 - 1
            latents.append((pipe.vae.encode(video).latent_dist.mode() - mean) / std)
        known = {
            text: pipe.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=512)[0]
            for text in dict.fromkeys(captions)
        }
    return torch.cat(latents), torch.cat([known[text] for text in captions])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
