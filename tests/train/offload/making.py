"""Shared by tests of offloading: tiny real models with enough blocks, random plans, and runs to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from supertuner.config.settings.model import AdapterSettings
from supertuner.config.settings.optim import OptimizerSettings
from supertuner.models.adapters import attach as adapters
from supertuner.models.blocks import named_blocks
from supertuner.models.objective.diffusion import TrainingObjective, sample_noise, sample_uniform
from supertuner.models.quantization import quantize_blocks
from supertuner.models.spec import Expert, Tensors
from supertuner.optim.ema import EmaWeights
from supertuner.optim.optimizer_registry import build_optimizer
from supertuner.plan.placement.plan import ActivationPolicy, BlockPlan, MemoryPlan, OptimizerPlacement, WeightPlacement
from supertuner.step.batch import StepBatch
from supertuner.step.precision import ComputePrecision, PrecisionName
from supertuner.step.train_step import (
    DenoiseFunction,
    ExpertState,
    StepOptions,
    WindowResult,
    prepare_for_training,
    train_window,
)
from supertuner.train.offload.apply import OffloadedExpert, apply_plan, move_to_device
from supertuner.train.offload.transfer import SynchronousTransfer

CPU = torch.device("cpu")
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def wan(layers: int = 5) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=48, num_layers=layers,
    )  # fmt: skip


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=False, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2), attention_head_dim=(1, 2), cross_attention_dim=16, norm_num_groups=4,
        use_linear_projection=True,
    )  # fmt: skip


def _wan(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, _: Tensors) -> torch.Tensor:
    found: torch.Tensor = module(noisy, levels * 1000, text["embeds"], return_dict=False)[0]
    return found


def _flux(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, _: Tensors) -> torch.Tensor:
    tokens = noisy.flatten(2).transpose(1, 2)
    found: torch.Tensor = module(
        hidden_states=tokens, encoder_hidden_states=text["embeds"], pooled_projections=text["embeds"][:, 0],
        timestep=levels, img_ids=torch.zeros(tokens.shape[1], 3), txt_ids=torch.zeros(text["embeds"].shape[1], 3),
        return_dict=False,
    )[0]  # fmt: skip
    return found.transpose(1, 2).reshape(noisy.shape)


def _unet(module: nn.Module, noisy: torch.Tensor, levels: torch.Tensor, text: Tensors, _: Tensors) -> torch.Tensor:
    found: torch.Tensor = module(noisy[:, :, 0], levels * 1000, text["embeds"], return_dict=False)[0]
    return found[:, :, None]


MODELS: dict[str, tuple[Callable[[], nn.Module], DenoiseFunction]] = {
    "wan": (wan, _wan),
    "flux": (flux, _flux),
    "unet": (unet, _unet),
}


@dataclass(frozen=True)
class OffloadCase:
    """A small training run."""

    model: str = "wan"
    kind: str = "lora"
    optimizer: str = "adamw"
    precision: PrecisionName = "fp32"
    ema: bool = True
    dropout: float = 0.1
    base: str = "as_computed"

    def expert_state(self, name: str = "model") -> ExpertState:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(name))
            module = MODELS[self.model][0]().eval().requires_grad_(False)
            for parameter in module.parameters():  # zeros would hide mistakes
                parameter.data += 0.02 * torch.randn_like(parameter)
        if self.kind != "full":
            module = module.to(ComputePrecision(self.precision, CPU).dtype)
        if self.base == "int8":
            quantize_blocks(module, "int8", CPU)
        dropout = self.dropout if self.kind not in ("full", "diff") else 0.0
        settings = AdapterSettings.model_validate({"type": self.kind, "rank": 2, "dropout": dropout})
        trained = adapters.attach(module, settings, TARGETS, seed=1, name=name)
        for place, parameter in enumerate(trained.parameters.values() if self.kind != "full" else ()):
            parameter.data += 0.05 * sample_noise(7, place, parameter.shape)
        prepare_for_training(module, False)
        parameters = dict(trained.parameters)
        optimizer = build_optimizer(
            OptimizerSettings.model_validate({"name": self.optimizer}), parameters, name, seed=3
        )
        ema = EmaWeights(parameters, 0.9) if self.ema else None
        scaler = ComputePrecision(self.precision, CPU).scaler()
        return ExpertState(Expert(name, "transformer"), module, parameters, optimizer, ema, scaler)

    def step_options(self) -> StepOptions:
        return StepOptions(
            MODELS[self.model][1], TrainingObjective(), ComputePrecision(self.precision, CPU), max_grad_norm=0.5
        )


def batch(positions: Sequence[int], side: int = 4) -> StepBatch:
    shape = (4, 1, side, side)
    return StepBatch(
        latents=torch.stack([sample_noise(1, position, shape) for position in positions]),
        noise=torch.stack([sample_noise(2, position, shape) for position in positions]),
        sigmas=torch.tensor([0.1 + 0.8 * sample_uniform(3, position) for position in positions]),
        text={"embeds": torch.stack([sample_noise(4, position, (8, 16)) for position in positions])},
        conditions={},
        positions=tuple(positions),
    )


def window(expert_state: ExpertState, options: StepOptions, number: int) -> WindowResult:
    """Three samples in two micro-batches of two shapes."""
    first = number * 3
    given = (batch([first, first + 1]), batch([first + 2], side=6))
    return train_window(expert_state, given, samples=3, learning_rate=0.01, options=options, seed=number)


def outcome(expert_state: ExpertState) -> dict[str, Any]:
    """Everything that training changed, in host memory."""
    found: dict[str, Any] = {name: p.detach().cpu().clone() for name, p in expert_state.parameters.items()}
    for name, parameter in expert_state.parameters.items():
        for key, value in expert_state.optimizer.torch_optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                dense = (
                    value.dequantize() if hasattr(value, "dequantize") and type(value) is not torch.Tensor else value
                )
                found[f"{name}/{key}"] = dense.detach().cpu().clone()
        if expert_state.ema is not None:
            found[f"{name}/ema"] = expert_state.ema.averages[name].cpu().clone()
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    assert not wrong, f"{len(wrong)} of {len(one)} differ: {wrong[:4]}"


def block_names(module: nn.Module) -> list[str]:
    return list(named_blocks(module))


def a_plan(
    module: nn.Module,
    weights: Sequence[WeightPlacement] | WeightPlacement = WeightPlacement.GPU,
    activations: Sequence[ActivationPolicy] | ActivationPolicy = ActivationPolicy.KEEP,
    *,
    ahead: int = 1,
    stepping: OptimizerPlacement = OptimizerPlacement.GPU,
    idle_at_home: bool = False,
) -> MemoryPlan:
    names = block_names(module)
    homes = [weights] * len(names) if isinstance(weights, WeightPlacement) else list(weights)
    fates = [activations] * len(names) if isinstance(activations, ActivationPolicy) else list(activations)
    rows = [BlockPlan(*row, reason="a test") for row in zip(names, homes, fates, strict=True)]
    around = [BlockPlan(name, WeightPlacement.GPU, ActivationPolicy.KEEP, "a test") for name in ("(before)", "(after)")]
    blocks = (around[0], *rows, around[1])
    return MemoryPlan("train", "a test", True, blocks, ahead, stepping, idle_at_home, None)


@st.composite
def plans(draw: st.DrawFn, blocks: int) -> dict[str, Any]:
    """Random arguments for `a_plan`."""
    return {
        "weights": draw(st.lists(st.sampled_from(WeightPlacement), min_size=blocks, max_size=blocks)),
        "activations": draw(st.lists(st.sampled_from(ActivationPolicy), min_size=blocks, max_size=blocks)),
        "ahead": draw(st.integers(0, blocks + 1)),
        "stepping": draw(st.sampled_from(OptimizerPlacement)),
    }


def apply_plan_synchronously(expert_state: ExpertState, plan: MemoryPlan) -> OffloadedExpert:
    return apply_plan(expert_state, plan, SynchronousTransfer(CPU), min_offload_bytes=1)


def restore_to_device(offloaded: OffloadedExpert) -> None:
    """Detach the plan, and move everything to the device, as without a plan."""
    offloaded.detach()
    move_to_device(offloaded.expert_state.module.parameters(), offloaded.transfer.device)
    offloaded.parameter_state.move_to(offloaded.transfer.device)
