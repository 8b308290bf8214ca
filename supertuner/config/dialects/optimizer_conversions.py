"""Conversions of dialect keys about the optimizer, its learning rates and the clipping of gradients. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from supertuner.config.dialects.conversions import (
    ConversionNote,
    ConversionOutcome,
    InvalidValue,
    KeyConversion,
    Outcomes,
    SettingValue,
    not_available,
    sibling_value,
)
from supertuner.config.settings.values import format_value, parse_text
from supertuner.core.types import JSON

OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_bf16", "adam_bfloat16", "optimi-adamw", "torch-adamw", "adam"), "adamw"),
    **dict.fromkeys(("adamw8bit", "adamw8", "adam8bit", "adam8", "ao-adamw8bit", "bnb-adamw8bit"), "adamw8bit"),
    **dict.fromkeys(("adafactor", "torch-adafactor"), "adafactor"),
    **dict.fromkeys(("prodigy", "prodigyopt"), "prodigy"),
    **dict.fromkeys(("adamw_schedulefree", "schedulefree", "schedule_free"), "schedule_free"),
    **dict.fromkeys(("lion", "optimi-lion"), "lion"),
    "automagic": "automagic",
}
"""Optimizers of the dialects → ours, with the same algorithm."""
SIMILAR_OPTIMIZERS = {
    "torch-adam": ("adamw", "it decays weights independently of the gradients"),
    "optimi-adam": ("adamw", "it decays weights independently of the gradients"),
    "use_8bit_adam": ("adamw8bit", "its states are those of torchao"),
    **dict.fromkeys(
        ("optimi-stableadamw", "torch-radam", "optimi-radam", "torch-nadam", "torch-adamax"),
        ("adamw", "set optimizer.lr_warmup_steps and train.max_grad_norm for stability"),
    ),
    **dict.fromkeys(("optimi-ranger", "optimi-adan", "ranger21", "soap", "muon"), ("adamw", "learning rates differ")),
    **dict.fromkeys(
        ("ao-adamw4bit", "ao-adamfp8", "ao-adamwfp8", "bnb-adamw8bit-paged", "bnb-adamw-paged", "bnb-adamw"),
        ("adamw8bit", "the plan moves optimizer state to host memory if the GPU is too small"),
    ),
    **dict.fromkeys(("lion8bit", "bnb-lion", "bnb-lion-paged", "bnb-lion8bit"), ("lion", "its states have 32 bits")),
    "bnb-lion8bit-paged": ("lion", "its states have 32 bits"),
    "adamw_schedulefree+aggressive": ("schedule_free", "with the package's own constants"),
    "adamw_schedulefree+no_kahan": ("schedule_free", "with the package's own constants"),
    "prodigy8bit": ("prodigy", "its states have 32 bits"),
    **dict.fromkeys(
        ("automagic2", "automagic3", "automagicexperiment"), ("automagic", "with the first version's rule")
    ),
}
"""Optimizers that are not available → the closest one, and what to know about it."""
ADAM_SHORT_NAMES = ("dadaptation", "dadaptadam", "dadaptlion")
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "sine")
WAVE_SCHEDULES = ("cosine", "sine", "cosine_with_restarts")
"""Schedules of SimpleTuner whose period is `lr_warmup_steps`; they have no warm-up."""
SIMPLETUNER_LR_END, SIMPLETUNER_LR_POWER, SIMPLETUNER_GRAD_LIMIT = 4e-7, 0.8, 2.0
"""Defaults of SimpleTuner."""


def optimizer_name(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """The name of an optimizer. One with a different algorithm is replaced by the closest one, with a note."""
    name = value.lower() if isinstance(value, str) else ""
    if name in OPTIMIZERS:
        return [SettingValue("optimizer.name", OPTIMIZERS[name])]
    if name.startswith(ADAM_SHORT_NAMES):
        name, hint = "prodigy", "which also estimates its learning rate"
    elif name in SIMILAR_OPTIMIZERS:
        name, hint = SIMILAR_OPTIMIZERS[name]
    else:
        return [SettingValue("optimizer.name", value)]
    note = ConversionNote(f'{format_value(value)} is not available; "{name}" is used: {hint}')
    return [SettingValue("optimizer.name", name), note]


def simpletuner_optimizer_config(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `optimizer_config`, text of the form `eps=1e-6,weight_decay=0.0`."""
    settings = {"weight_decay": "weight_decay", "beta1": "beta1", "beta2": "beta2", "eps": "epsilon"}
    outcomes: list[ConversionOutcome] = []
    unknown = []
    for part in str(value or "").split(","):
        name, _, text = part.strip().partition("=")
        if name in settings:
            outcomes.append(SettingValue(f"optimizer.{settings[name]}", parse_text(text), is_implied=True))
        elif name:
            unknown.append(name)
    if unknown:
        outcomes.append(ConversionNote(f"{', '.join(unknown)}: only {', '.join(settings)} are available"))
    return outcomes


def betas(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """A pair of betas, as torch's optimizers take them."""
    if not isinstance(value, list) or len(value) < 2:
        return [InvalidValue(f"{format_value(value)} is not a list of two numbers")]
    return [SettingValue(f"optimizer.beta{number}", beta) for number, beta in enumerate(value[:2], 1)]


def simpletuner_schedule(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `lr_scheduler`."""
    name = {"cosine_with_warmup": "cosine"}.get(str(value), value)
    if not isinstance(name, str) or name not in SCHEDULES:
        return [not_available(value, SCHEDULES)]
    kind = {"constant_with_warmup": "constant", "sine": "cosine"}.get(name, name)
    outcomes: list[ConversionOutcome] = [SettingValue("optimizer.lr_scheduler", kind)]
    period = sibling_value(block, "lr_warmup_steps") or 1000
    if name in ("cosine", "sine"):
        outcomes.append(
            ConversionNote(
                f"the rate falls once over the run; SimpleTuner's is a wave of {2 * _number(period):g} steps"
            )
        )
    if name == "cosine_with_restarts":
        cycles = max(1, round(_number(sibling_value(block, "max_train_steps"), period) / _number(period, 1)))
        outcomes += [
            SettingValue("optimizer.lr_cycles", cycles, is_implied=True),
            ConversionNote(
                f"falls {cycles} times, every lr_warmup_steps {period}; SimpleTuner 4.8.0 keeps it constant"
            ),
        ]
    if name == "polynomial":
        outcomes.append(SettingValue("optimizer.lr_power", SIMPLETUNER_LR_POWER, is_implied=True))
    if kind not in ("constant", "linear"):
        outcomes += _end_factor(SIMPLETUNER_LR_END, sibling_value(block, "learning_rate"), is_implied=True)
    return outcomes


def simpletuner_warmup(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `lr_warmup_steps`, which is the period of some schedules."""
    if value and sibling_value(block, "lr_scheduler") in WAVE_SCHEDULES:
        return [ConversionNote("is the period of this schedule in SimpleTuner; there is no warm-up")]
    return [SettingValue("optimizer.lr_warmup_steps", value or 0)]


def simpletuner_lr_end(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `lr_end`, a learning rate; ours is a fraction of the full rate."""
    if sibling_value(block, "lr_scheduler") not in (*WAVE_SCHEDULES, "polynomial"):
        return [ConversionNote("has no effect with this lr_scheduler, in SimpleTuner as well")]
    return _end_factor(value, sibling_value(block, "learning_rate"))


def simpletuner_lr_power(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    if sibling_value(block, "lr_scheduler") == "polynomial":
        return [SettingValue("optimizer.lr_power", value)]
    return [ConversionNote("has no effect with this lr_scheduler, in SimpleTuner as well")]


def _end_factor(end: JSON, learning_rate: JSON, is_implied: bool = False) -> Outcomes:
    if not _is_number(end) or not _is_number(learning_rate) or learning_rate <= 0:
        return [ConversionNote("has no effect: it needs learning_rate, a number above 0")]
    factor = round(min(1.0, max(0.0, end / learning_rate)), 12)
    return [SettingValue("optimizer.lr_end_factor", factor, is_implied)]


def simpletuner_clipping(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `max_grad_norm`, which `grad_clip_method` makes a limit of each element (its default) or of the
    norm."""
    by_norm = sibling_value(block, "grad_clip_method") == "norm"
    if value in (0, None, -1):
        return []
    if by_norm:
        return [SettingValue("train.max_grad_norm", value)]
    return [
        SettingValue("train.max_grad_value", value),
        ConversionNote('sets train.max_grad_value: grad_clip_method is "value", the default of SimpleTuner'),
    ]


def clipping_method(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """SimpleTuner's `grad_clip_method`; alone, with the default limit."""
    if value not in ("value", "norm"):
        return [not_available(value, ("value", "norm"))]
    if "max_grad_norm" in block or "--max_grad_norm" in block:
        return []
    return [SettingValue(f"train.max_grad_{value}", SIMPLETUNER_GRAD_LIMIT, is_implied=True)]


def ai_toolkit_schedule(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `lr_scheduler`, with the arguments of torch's schedules in `lr_scheduler_params`."""
    parameters = block.get("lr_scheduler_params")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    outcomes: list[ConversionOutcome] = []
    match value:
        case "constant" | "cosine" | "cosine_with_restarts" | "polynomial":
            outcomes.append(SettingValue("optimizer.lr_scheduler", value))
        case "constant_with_warmup":
            warmup = parameters.get("num_warmup_steps", 1000)
            outcomes += [
                SettingValue("optimizer.lr_scheduler", "constant"),
                SettingValue("optimizer.lr_warmup_steps", warmup),
            ]
        case "linear":
            falls = _number(parameters.get("start_factor"), 1 / 3) >= _number(parameters.get("end_factor"), 1.0)
            outcomes.append(SettingValue("optimizer.lr_scheduler", "linear" if falls else "constant"))
            if not falls:
                rising = "ai-toolkit's linear rate rises to the full rate"
                outcomes.append(ConversionNote(f"{rising}; here it is constant: set optimizer.lr_warmup_steps"))
        case "step":
            outcomes += [
                SettingValue("optimizer.lr_scheduler", "linear"),
                ConversionNote('"step" is not available; the rate falls linearly to 0'),
            ]
        case _:
            outcomes.append(SettingValue("optimizer.lr_scheduler", value))
    if value == "cosine_with_restarts" and parameters.get("T_0"):
        cycles = max(1, round(_number(block.get("steps"), parameters["T_0"]) / _number(parameters["T_0"], 1)))
        outcomes.append(SettingValue("optimizer.lr_cycles", cycles, is_implied=True))
    return outcomes


def ai_toolkit_schedule_parameters(value: JSON, block: Mapping[str, JSON]) -> Outcomes:
    """ai-toolkit's `lr_scheduler_params`, arguments of the schedule."""
    if value in (None, {}):
        return []
    if not isinstance(value, Mapping):
        return [InvalidValue(f"{format_value(value)} is not a block")]
    schedule = block.get("lr_scheduler", "constant")
    read = {"num_warmup_steps", "total_iters", "start_factor", "T_0", "last_epoch", "T_max"}
    outcomes: list[ConversionOutcome] = []
    if "eta_min" in value and str(schedule).startswith("cosine"):
        outcomes += _end_factor(value["eta_min"], block.get("lr"))
        read.add("eta_min")
    if "end_factor" in value and schedule == "linear":
        outcomes.append(SettingValue("optimizer.lr_end_factor", value["end_factor"]))
    if schedule == "polynomial" and "power" in value:
        outcomes.append(SettingValue("optimizer.lr_power", value["power"]))
    unread = sorted(set(value) - read - {"end_factor", "power"})
    if unread:
        outcomes.append(ConversionNote(f"{', '.join(unread)}: has no effect on this schedule here"))
    return outcomes


def note_unless(expected: Sequence[JSON], message: str) -> KeyConversion:
    """Accept the values of `expected` silently, and others with a note."""
    return lambda value, block: [] if value in expected else [ConversionNote(message)]


def _is_number(value: JSON) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: JSON, default: JSON = 0) -> float:
    """`value` if it is a number, else `default`, else 0."""
    for candidate in (value, default):
        if _is_number(candidate):
            return candidate
    return 0.0
