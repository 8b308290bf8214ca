"""`supertuner quickstart`: a complete training run of a tiny model, in minutes on two CPU cores."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from supertuner.cli.options import SetOption


def quickstart(
    folder: Annotated[Path, typer.Option("--dir", help="The folder to write to.")] = Path("quickstart"),
    sets: SetOption = None,
) -> None:
    """Draw a captioned dataset, stage and cache it, train both experts of a tiny Wan2.2 on it, and show the result."""
    from supertuner.tools.quickstart import run_quickstart

    result = run_quickstart(folder, sets or [])
    trained = result.training
    if trained.stopped_by is not None:
        typer.echo(f"stopped by {trained.stopped_by} after {trained.steps} steps; the same command resumes it")
        raise typer.Exit(130)
    supertuner, tensorboard = (_command_path(name) for name in ("supertuner", "tensorboard"))
    decrease = f" ({100 * (1 - result.loss_after / result.loss_before):.0f} % less)" if result.loss_before else ""
    memory = "\n".join(f"memory: {line}" for line in trained.memory_lines)
    exported = "\n".join(f"  {path}" for path in trained.adapters)
    typer.echo(
        f"""
done in {result.seconds:.0f} s: {trained.steps} optimizer steps of two experts, {trained.samples} samples
loss on held-out pictures: {result.loss_before:.4f} before, {result.loss_after:.4f} after{decrease}
{memory}

look at
  {result.comparison}   samples of colour and shape pairs that are not in the training data: before and after training
  {trained.loss_curve}   loss by step
  {result.contact_sheet}   the training data
exported adapters (diffusers: load_lora_weights; the second with load_into_transformer_2=True)
{exported}

next:
  {supertuner} run show {trained.run_dir}
  {supertuner} checkpoint ls {trained.run_dir}
  {supertuner} arena ls
  {tensorboard} --logdir {trained.run_dir / "tensorboard"}
with a real model and your own pictures or clips: copy {result.config}, and in the copy set
  model.path                             "Wan-AI/Wan2.2-T2V-A14B-Diffusers", or a folder
  datasets[0].instance_data_dir          your folder, with a caption in a .txt beside each file
  resolution, bucket_step                for example 480 and 16; frames: 81 and dataset_type: "video" for clips
  train.mixed_precision                  "bf16"; gradient_checkpointing: true
then
  {supertuner} config validate my.json
  {supertuner} train my.json"""
    )


def _command_path(name: str) -> str:
    """How to type a command of this environment: its name if it is on the PATH, else its path."""
    return name if shutil.which(name) else str(Path(sys.argv[0]).with_name(name))
