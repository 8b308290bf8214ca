"""The overhead of the training loop: milliseconds per micro-batch, and the share of a step spent waiting for data.

The model has one parameter, so the time is everything else: batches from the caches, noise, the window, the optimizer,
and the default logs and reports. The peer is a plain PyTorch loop with the same mathematics and tensors in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.harness import ClaimRow, FigureSpread, at_most, in_memory_folder, interleave, report, say
from benchmarks.runs import SingleScaleModel, denoise_with_scale, lighten, opened, rewind, write_config
from supertuner.train.loop import train
from supertuner.train.run.training_run import TrainingRun

STEPS, MICRO, BATCH = 100, 4, 8
OVERHEAD_LIMIT_MS = 1.0
STEP_S = 0.05
WAIT_LIMIT = 0.5


def bare_loop(run: TrainingRun) -> Callable[[], None]:
    """A plain loop with the same mathematics, on random batches of the cached latents."""
    order = run.collator.corpus.order
    from supertuner.data.ordering.micro_batches import micro_batches

    micros = micro_batches(order, range(order.epoch_length(0)), 1)
    latents = torch.cat([run.collator.encoded.latents(micro)["latents"] for micro in micros])
    texts = [run.collator.encoded.texts(micro)[0] for micro in micros]
    module = SingleScaleModel()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def loop() -> None:
        losses = []
        for _ in range(STEPS):
            total = 0.0
            for _ in range(MICRO):
                rows = torch.randint(len(latents), (BATCH,))
                clean = latents[rows].float()
                run.family.pad_text(run.model, [texts[row] for row in rows.tolist()])
                noise = torch.randn(clean.shape)
                level = torch.sigmoid(torch.randn(BATCH)).view(-1, 1, 1, 1, 1)
                predicted = module((1 - level) * clean + level * noise)
                each = (predicted - (noise - clean)).square().flatten(1).mean(1)
                (each.sum() / (BATCH * MICRO)).backward()
                total += each.detach().sum()
            torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(total) / (BATCH * MICRO))

    return loop


def overhead() -> ClaimRow:
    blocks = {"train": {"batch_size": BATCH, "gradient_accumulation_steps": MICRO, "max_steps": STEPS}}
    with in_memory_folder() as folder, opened(write_config(folder, **blocks)) as (_, run):
        lighten(run)

        def ours() -> None:
            rewind(run)
            train(run)

        times = interleave({"ours": ours, "bare": bare_loop(run)}, rounds=9)
    beyond = [
        (a - b) / (STEPS * MICRO) * 1e3 for a, b in zip(times["ours"].rounds_s, times["bare"].rounds_s, strict=True)
    ]
    say(f"ours {times['ours']}, bare {times['bare']} for {STEPS} steps of {MICRO} micro-batches of {BATCH}")
    middle = sorted(beyond)[len(beyond) // 2]
    return at_most(
        "the training loop beyond a bare PyTorch loop, per micro-batch of 8",
        FigureSpread(middle, min(beyond), max(beyond)),
        OVERHEAD_LIMIT_MS,
        unit="ms",
        note=f"ours / bare {times['ours'].median_s / times['bare'].median_s:.2f}",
    )


def waiting() -> ClaimRow:
    """The share of waiting with a 50 ms step that leaves the CPU idle, as a step on a GPU does."""

    def sleepy(*arguments: object) -> torch.Tensor:
        time.sleep(STEP_S)
        return denoise_with_scale(*arguments)  # type: ignore[arg-type]

    blocks = {"train": {"batch_size": BATCH, "max_steps": STEPS}}
    waited: list[float] = []
    with in_memory_folder() as folder, opened(write_config(folder, **blocks)) as (_, run):
        lighten(run, sleepy)
        with run.dataloader() as feed:
            from supertuner.train import loop

            for window in feed:
                loop._train_step(run, window)
                waited.append(window.waited_s)
    shares = [100 * seconds / STEP_S for seconds in waited[1:]]  # nothing overlaps with the first batch
    mean = sum(shares) / len(shares)
    return at_most(
        "waiting for data, share of a step of 50 ms", FigureSpread(mean, min(shares), max(shares)), WAIT_LIMIT, unit="%"
    )


def rows() -> list[ClaimRow]:
    torch.set_num_threads(1)
    return [overhead(), waiting()]


def main() -> int:
    return report(rows())


if __name__ == "__main__":
    raise SystemExit(main())
