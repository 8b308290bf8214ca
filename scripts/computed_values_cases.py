"""The cases of computed_values.py: short configurations of every kind, and the pictures that they learn from."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

Tree = dict[str, Any]
FAMILIES: Final = ("wan2.2", "flux", "qwen-image", "qwen-image-edit", "sdxl", "sd3.5")
CONFIG: Final = "config.json"
RUN: Final = "runs/run"
EXPORT: Final = f"{RUN}/exports/step-00000004/run-step00000004"
"""Exported files of the base case, without the expert."""
"""Where the usual run's folder is, seen from its case's."""


@dataclass(frozen=True)
class Call:
    """One call of the command, in the case's folder."""

    arguments: Sequence[str]
    processes: int = 1
    exit_code: int = 0
    """What it ends with if all is well."""
    printed: bool = False
    """Whether what it prints is a value too: JSON."""
    stop_after: int = 0
    """Send SIGTERM once so many steps are in the loss log."""


TRAIN = Call(("train", CONFIG))


@dataclass(frozen=True)
class Case:
    """A configuration, and what is called with it."""

    changes: Tree = field(default_factory=dict)
    """Blocks of the configuration, or single values of them, that differ from the usual ones."""
    calls: Sequence[Call] = (TRAIN,)


def configuration(changes: Tree) -> Tree:
    """Two experts of a tiny Wan2.2, four steps, held-out loss and one sample at the end; and what a case changes."""
    tree: Tree = {
        "run": {"name": "run", "output_dir": "runs", "seed": 7},
        "model": {"family": "wan2.2", "path": "tiny"},
        "adapter": {"rank": 2},
        "arena": {"home": "arenas"},
        "datasets": datasets(),
        "train": {"batch_size": 2, "max_steps": 4, "mixed_precision": "fp32", "device": "cpu"},
        "optimizer": {"learning_rate": 0.001},
        "checkpoints": {"every_steps": 0},
        "validation": {"inference_steps": 2, "prompts": ["a red square"]},
        "report": {"tensorboard": False},
    }
    for block, values in changes.items():
        tree[block] = {**tree.get(block, {}), **values} if isinstance(values, dict) else values
    return tree


def datasets(*further: Tree, of: str = "train", pairs: bool = False, **changes: Any) -> list[Tree]:
    """Pictures to train on, two held-out ones, and further datasets; `changes` are to the first."""
    common: Tree = {"resolution": 32, "bucket_step": 16}
    sets: list[Tree] = [{"id": "first", "instance_data_dir": f"../data/{of}", **changes}]
    sets += [{"id": f"further-{number}", **one} for number, one in enumerate(further)]
    sets += [{"id": "held-out", "instance_data_dir": "../data/held_out", "held_out": True}]
    for one in sets if pairs else ():
        one |= {"conditioning_dir": f"{one['instance_data_dir']}_before", "conditioning_resolution": 64}
    return [{**common, **one} for one in sets]


def of_family(name: str, **changes: Any) -> Tree:
    data = {"datasets": datasets(pairs=True)} if name == "qwen-image-edit" else {}
    return {"model": {"family": name}, "validation": {"at_start": True}, **data, **changes}


def cases() -> Iterator[tuple[str, Case]]:
    """All cases by name."""
    yield "quickstart", Case(calls=[Call(["quickstart", "--dir", ".", "--set", "arena.home=arenas"])])
    for name in FAMILIES:
        yield f"family-{name}", Case(of_family(name))
        yield f"family-{name}-bf16", Case(of_family(name, train={"mixed_precision": "bf16"}))
        if name != "qwen-image-edit":
            yield f"family-{name}-full", Case(of_family(name, adapter={"type": "full"}))
    one_expert = {"model": {"experts": "low_noise"}, "train": {"max_grad_norm": 0.05, "num_epochs": 1}}
    yield "one-expert", Case(one_expert)
    yield "video", Case(_video(), [Call(["sample-data", "shapes", "--images", "0", "--sounds", "0"]), TRAIN])
    yield from ((f"adapter-{name}", Case(changes)) for name, changes in _adapters())
    yield "adapter-start-from-and-frozen", _on_top_of_files()
    yield "adapter-files", _adapter_files()
    yield from ((f"optimizer-{name}", Case(changes)) for name, changes in _optimizers())
    yield from ((name, Case(changes)) for name, changes in (*_steps(), *_objectives(), *_data(), *_plans()))
    yield from _many_processes()
    yield from _resumed()
    yield from _commands()


def _video() -> Tree:
    clips = {"id": "clips", "instance_data_dir": "shapes/videos", "dataset_type": "video", "frames": 5, "limit": 3}
    small = {"resolution": 32, "bucket_step": 16}
    return {"datasets": [{**clips, **small}], "validation": {"frames": 5, "width": 32, "height": 32}}


def _adapters() -> Iterator[tuple[str, Tree]]:
    yield "lora-dropout", {"adapter": {"dropout": 0.2, "targets": "attention_mlp", "alpha": 1.0}}
    yield "dora", {"adapter": {"dora": True}}
    yield "rslora", {"adapter": {"rslora": True, "rank": 4, "alpha": 2.0}}
    for kind in ("locon", "loha", "lokr"):
        yield kind, {"adapter": {"type": kind, "dropout": 0.1}}
    yield "lokr-full-matrix", {"adapter": {"type": "lokr", "lokr_factor": 4, "lokr_full_matrix": True}}
    yield "diff", {"adapter": {"type": "diff"}}
    modules = [{"match": "blocks.1.*", "rank": 3}, {"match": "ffn.net.2", "alpha": 4.0}]
    experts = {"high_noise": {"rank": 4}, "low_noise": {"targets": "attention_mlp"}}
    yield "by-layer-and-expert", {"adapter": {"targets": "all_linear", "modules": modules, **experts}}
    yield "sdxl-convolutions", {"model": {"family": "sdxl"}, "adapter": {"type": "locon", "targets": "all_layers"}}


def _optimizers() -> Iterator[tuple[str, Tree]]:
    falling = {"lr_scheduler": "cosine", "lr_warmup_steps": 2, "high_noise_lr": 0.002, "weight_decay": 0.1}
    yield "adamw-cosine", {"train": {"max_steps": 6}, "optimizer": falling}
    for name in ("adamw8bit", "adafactor", "prodigy", "schedule_free", "automagic"):
        # 8-bit states are for tensors of at least 4,096 weights: all of them are trained.
        adapter = {"type": "full"} if name == "adamw8bit" else {}
        chosen = {"name": name, "learning_rate": {"prodigy": 1.0, "automagic": 1e-4}.get(name, 1e-3)}
        yield name, {"adapter": adapter, "train": {"max_steps": 6}, "optimizer": chosen}
    bumps = {"high_noise_lr_bump": 1e-5, "low_noise_max_lr": 5e-4, "lr_scheduler": "linear"}
    automagic = {"name": "automagic", "learning_rate": 1e-4, **bumps}
    full = {"adapter": {"type": "full"}, "train": {"mixed_precision": "bf16"}}
    yield "automagic-full-bf16", {**full, "optimizer": automagic}


def _steps() -> Iterator[tuple[str, Tree]]:
    yield "ema", {"train": {"ema_decay": 0.9}}
    yield "fp16", {"train": {"mixed_precision": "fp16"}}
    for kind in ("int8", "fp8"):
        yield f"base-{kind}", {"model": {"base_weights": kind}, "train": {"mixed_precision": "bf16"}}
    yield "base-int8-flux", {"model": {"family": "flux", "base_weights": "int8"}, "adapter": {"type": "lokr"}}
    yield "gradient-checkpointing", {"train": {"gradient_checkpointing": True}, "adapter": {"dropout": 0.2}}
    accumulated = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}
    yield "accumulation", {"model": {"switch_boundary_every": 2}, "train": accumulated}
    yield "ramp", {"gh200_optimizations": RAMP, "train": {"max_steps": 6, "ema_decay": 0.9}}
    guided = {"seeds": [1, 2], "guidance_scale": 2.0, "negative_prompt": "a circle", "every_steps": 2}
    yield "validation", {"validation": {**guided, "held_out_levels": [0.2, 0.95]}, "checkpoints": {"every_steps": 1}}


RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 1,
    "target_effective_batch_size": 4,
    "batch_rampup_steps": 4,
}


def _objectives() -> Iterator[tuple[str, Tree]]:
    yield "min-snr", {"model": {"family": "sdxl"}, "objective": {"weighting": "min_snr", "snr_gamma": 3.0}}
    path = {"weighting": "debiased", "flow_snr": "path", "loss": "huber", "huber_delta": 0.3}
    yield "debiased-huber", {"model": {"family": "flux"}, "objective": path}
    drawn = {"timesteps": "logit_normal", "logit_mean": 0.3, "logit_std": 0.7, "shift": "auto"}
    yield "sigma-sqrt-shift", {"model": {"family": "sd3.5"}, "objective": {"weighting": "sigma_sqrt", **drawn}}
    yield "cosmap-uniform", {"objective": {"weighting": "cosmap", "timesteps": "uniform", "shift": 2.0}}
    masked: Tree = {"mask_dir": "../data/masks", "mask_floor": 0.1, "loss_weights_file": "../data/weights.csv"}
    yield "masks", {"datasets": datasets(**masked)}
    prior = {"instance_data_dir": "../data/mixed", "prior": True, "loss_weight": 0.5}
    yield "prior", {"datasets": datasets(prior)}
    yield "prior-full", {"model": {"family": "flux"}, "adapter": {"type": "full"}, "datasets": datasets(prior)}


def _data() -> Iterator[tuple[str, Tree]]:
    colours = {"flip": 0.5, "brightness": 0.1, "contrast": 0.1, "saturation": 0.2, "hue": 0.05}
    captions: Tree = {"dropout": 0.3, "shuffle_tags": True, "trigger_word": "sks", "tag_separator": " "}
    changed: Tree = {"crop": "random", "augment": colours, "captions": captions}
    two_epochs = {"train": {"max_steps": 8}}
    for mode in ("static", "refresh_each_epoch", "disable_cache"):
        kept: Tree = {"variations": 2} if mode == "static" else {}
        mixed = datasets(of="mixed", augmentations_cache_mode=mode, **kept, **changed)
        yield f"augmented-{mode}", {"datasets": mixed, **two_epochs}
    none = {"vae_cache_type": "none", "text_cache_type": "none"}
    yield "no-caches", {"datasets": datasets(**changed), "cache_config": none, "loader": {"prefetch_batches": 2}}
    on_disk = {"vae_cache_type": "disk", "text_cache_type": "disk", "persistent_cache": True, "cache_dir": "cache"}
    buckets: Tree = {"resolution": [32, 64], "resolution_mode": "each", "type": "disk", "repeats": 2}
    further = {"instance_data_dir": "../data/train", "weight": 2.0, "in_memory": {"compression": "lz4"}}
    yield "buckets-on-disk", {"datasets": datasets(further, of="mixed", **buckets), "cache_config": on_disk}


def _plans() -> Iterator[tuple[str, Tree]]:
    """Weights, activations and states that move; the same bits as without."""
    streamed = {"weights": "streamed", "activations": "send", "optimizer": "streamed", "idle_experts": "host"}
    yield "plan-streamed", {"plan": streamed, "train": {"ema_decay": 0.9}}
    yield "plan-host", {"plan": {"weights": "streamed", "activations": "recompute", "optimizer": "host", "ahead": 2}}
    yield "plan-full", {"plan": streamed, "adapter": {"type": "full"}, "train": {"mixed_precision": "bf16"}}
    quantized = {"model": {"family": "flux", "base_weights": "int8"}, "adapter": {"type": "lokr"}}
    yield "plan-int8", {"plan": {"weights": "streamed", "activations": "send", "check_every_windows": 1}, **quantized}


def _many_processes() -> Iterator[tuple[str, Case]]:
    two = [Call(TRAIN.arguments, processes=2)]
    full = {"adapter": {"type": "full"}, "parallel": {"strategy": "fsdp"}}
    yield "ddp", Case({"train": {"ema_decay": 0.9, "max_steps": 6}, "gh200_optimizations": RAMP}, two)
    yield "ddp-full-flux", Case({"model": {"family": "flux"}, "adapter": {"type": "full"}}, two)
    yield "fsdp-lora", Case({"parallel": {"strategy": "fsdp"}, "train": {"mixed_precision": "bf16"}}, two)
    offload = {"strategy": "fsdp", "cpu_offload": True, "reduce_every_batch": True, "reshard_after_forward": False}
    yield "fsdp-full-offload", Case({**full, "parallel": offload, "optimizer": {"name": "schedule_free"}}, two)
    on_one = Call(["train", CONFIG, "--resume", f"{RUN}/checkpoints/step-00000002"])
    yield "fsdp-full-resumed-on-one", Case({**full, "checkpoints": {"every_steps": 2}}, [*two, on_one])


def _resumed() -> Iterator[tuple[str, Case]]:
    step = f"{RUN}/checkpoints/step-00000002"
    saved = {"checkpoints": {"every_steps": 2}, "train": {"ema_decay": 0.9}, "adapter": {"dropout": 0.1}}
    back = Call(["train", CONFIG, "--resume", step])
    longer = ["--set", "run.name=longer", "--set", "train.max_steps=6", "--resume", step]
    refused = Call(["train", CONFIG, "--resume", "never"], exit_code=1)
    yield "resume", Case(saved, [TRAIN, back, Call(["train", CONFIG, *longer]), refused])
    for name in ("automagic", "schedule_free"):
        yield f"resume-{name}", Case({**saved, "optimizer": {"name": name, "learning_rate": 1e-4}}, [TRAIN, back])
    stopped = Call(TRAIN.arguments, stop_after=2, exit_code=128 + signal.SIGTERM)
    # Where it stops is a matter of chance; the checkpoint of that step is not kept.
    long = {"train": {"max_steps": 150, "ema_decay": 0.9}, "checkpoints": {"every_steps": 0, "keep": 1}}
    yield "stopped-and-resumed", Case(long, [stopped, TRAIN])


def _on_top_of_files() -> Case:
    sets = ["--set", "run.name=again"]
    for expert in ("high_noise", "low_noise"):
        sets += ["--set", f"adapter.{expert}.start_from={EXPORT}_{expert}.safetensors"]
        sets += ["--set", f"adapter.{expert}.frozen={EXPORT}_{expert}.safetensors"]
    return Case(calls=[TRAIN, Call(["train", CONFIG, *sets])])


def _adapter_files() -> Case:
    high, low = (f"{EXPORT}_{expert}.safetensors" for expert in ("high_noise", "low_noise"))
    half = ["--base", f"{RUN}/tiny-wan2.2", "--out", "made/merged", "--strength", "0.5"]
    calls = [
        TRAIN,
        Call(["adapter", "export", high, "--for", "comfyui", "--out", "made/comfyui_high_noise.safetensors"]),
        Call(["adapter", "convert", low, "--to", "ai-toolkit", "--out", "made/toolkit.safetensors"]),
        Call(["adapter", "merge", high, low, *half]),
    ]
    return Case({"adapter": {"type": "lokr", "targets": "attention_mlp"}}, calls)


SIMPLETUNER: Tree = {
    "--model_type": "lora",
    "--model_family": "flux",
    "--pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
    "--base_model_precision": "int8-quanto",
    "--lora_rank": "32",
    "--lora_alpha": 16,
    "--flow_schedule_shift": 3,
    "--use_ema": "true",
    "--ema_decay": 0.99,
    "--max_train_steps": 1000,
    "--train_batch_size": 2,
    "--optimizer": "adamw_bf16",
    "--learning_rate": 1e-4,
    "--checkpoint_step_interval": 250,
    "--validation_prompt": "a cat",
    "--validation_resolution": "1024x576",
    "--validation_step_interval": 100,
    "--snr_gamma": 5,
}
AI_TOOLKIT: Tree = {
    "job": "extension",
    "config": {
        "name": "my first lora",
        "process": [
            {
                "type": "sd_trainer",
                "training_folder": "output",
                "trigger_word": "p3r5on",
                "network": {"type": "lora", "linear": 32, "linear_alpha": 16, "dropout": 0.1},
                "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4},
                "datasets": [
                    {"folder_path": "../data/train", "num_repeats": 3, "flip_x": True, "resolution": [512, 768]}
                ],
                "train": {"steps": 2000, "lr": 1e-4, "optimizer": "adamw8bit", "switch_boundary_every": 10},
                "model": {"name_or_path": "some/model", "arch": "wan22_14b:t2v", "quantize": True, "qtype": "qint8"},
                "sample": {"sample_every": 250, "width": 832, "height": 480, "num_frames": 41, "prompts": ["a bear"]},
            }
        ],
    },
}


def _commands() -> Iterator[tuple[str, Case]]:
    """What other commands print and draw, and how wrong settings end."""
    shown = [Call(["config", "show", file, "--all", "--json"], printed=True) for file in (CONFIG, *OTHER_FILES)]
    yield "settings", Case(calls=shown)
    estimated = Call(["estimate", CONFIG, "--machine", "gh200-96", "--json"], printed=True)
    yield "estimate", Case({"model": {"family": "flux"}}, [estimated])
    turned: Tree = {"crop": "random", "augment": {"flip": 0.5, "hue": 0.1, "crop_jitter": 0.5}}
    drawn = Call(["preview", CONFIG, "--out", "made.png"])
    yield "preview", Case({"datasets": datasets(of="mixed", **turned)}, [drawn])
    wrong = [
        Call(["config", "validate", CONFIG, "--set", "train.batch_sise=2"], exit_code=2),
        Call(["train", CONFIG, "--set", "adapter.rank=0"], exit_code=2),
        Call(["train", CONFIG, "--set", "model.path=nowhere"], exit_code=1),
        Call(["checkpoint", "verify", "nowhere"], exit_code=1),
    ]
    yield "refused", Case(calls=wrong)


OTHER_FILES: dict[str, Tree] = {"simpletuner.json": SIMPLETUNER, "ai-toolkit.json": AI_TOOLKIT}


def draw(folder: Path) -> None:
    """Captioned pictures: squares to train on, others to hold out, some of several shapes; masks, pairs, weights."""
    colours = ("red", "green", "blue", "white", "orange", "purple", "yellow", "cyan")
    sizes = {"train": [(32, 32)], "held_out": [(32, 32)], "mixed": [(48, 32), (32, 48), (70, 64), (32, 32)]}
    counts = {"train": 6, "held_out": 2, "mixed": 7}
    for name, count in counts.items():
        for sub in (name, f"{name}_before"):
            (folder / sub).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", sizes[name][number % len(sizes[name])], (number * 37 % 256, 40, 60 + len(name)))
            colour, corner = colours[(number + len(name)) % len(colours)], 4 + number
            ImageDraw.Draw(image).rectangle((corner, corner, corner + 14, corner + 14), fill=colour)
            image.save(folder / name / f"{number}.png")
            (folder / name / f"{number}.txt").write_text(f"a {colour} square")
            image.point([255 - value for value in range(256)] * 3).save(folder / f"{name}_before" / f"{number}.png")
    (folder / "masks").mkdir()
    for number in range(counts["train"] - 1):
        mask = Image.new("L", (32, 32), 0)
        ImageDraw.Draw(mask).rectangle((number, number, number + 20, number + 16), fill=255 - 20 * number)
        mask.save(folder / "masks" / f"{number}.png")
    (folder / "weights.csv").write_text("file_name,weight\n0.png,0.25\n3.png,2\n")
