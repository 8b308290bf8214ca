"""Stored traces are read back completely or not at all, and are keyed only by what determines them."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.events import Event, WarningEvent
from supertuner.models.family_loader import load_family as family_of
from supertuner.models.spec import Expert, Family, ModelDescription, ModelSource
from supertuner.plan.placement.step_table import OperatorWork
from supertuner.plan.trace.cached_traces import CachedTraces
from supertuner.plan.trace.encoder_shapes import BatchShape, EncoderShapeProbe
from supertuner.plan.trace.execution_trace import ExecutionTrace, StepPass, TensorKind, TraceSpan
from supertuner.plan.trace.inference_phases import (
    ENCODE_AND_DECODE,
    PREDICTION,
    sample_work,
    trace_media_encoding,
    trace_sampling,
    trace_text_encoding,
)
from supertuner.plan.trace.recorder import PLAIN_CPU
from supertuner.plan.trace.trace_store import (
    MAX_FILES,
    PACKAGE,
    TraceCache,
    package_source_files,
    program_versions,
    read_trace,
    serialize_trace,
)


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def a_trace() -> ExecutionTrace:
    return ExecutionTrace(
        phase="train model", device="cuda", alignment_bytes=512, blocks=("(before)", "blocks.0", "(after)"),
        nbytes=np.array([100, 600, 50]), birth=np.array([0, 1, 2]), death=np.array([5, 4, 3]),
        kind=np.array([TensorKind.FROZEN, TensorKind.ACTIVATION, TensorKind.TEMPORARY], dtype=np.uint8),
        block=np.array([1, 1, 2], dtype=np.int16),
        spans=(
            TraceSpan(1, StepPass.FORWARD, 0, 2, OperatorWork(1.5, 2.0, 3.0, 4), (0, 1)),
            TraceSpan(2, StepPass.BACKWARD, 2, 4, OperatorWork(), ()),
        ),
        end=5, block_inputs=np.array([[1, 1]], dtype=np.int32), micro_batches=3, notes=("one",),
        work_by_part=(("rest", OperatorWork(1.0)),),
    )  # fmt: skip


def same(one: ExecutionTrace, other: ExecutionTrace) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(ExecutionTrace))


def test_live_bytes_are_aligned_and_follow_allocations_and_releases() -> None:
    trace = a_trace()
    assert trace.live_bytes().tolist() == [512, 1536, 2048, 1536, 512, 0]
    assert trace.peak() == (2048, 2) and trace.live_bytes_by_kind(2)[TensorKind.ACTIVATION] == 1024


def test_a_stored_trace_is_read_back_unchanged(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(serialize_trace(a_trace(), "key"))
    found = read_trace(tmp_path / "one", "key")
    assert found is not None and same(found, a_trace()) and found.spans == a_trace().spans


def test_any_flipped_byte_or_truncation_is_detected(tmp_path: Path) -> None:
    whole, file = serialize_trace(a_trace(), "key"), tmp_path / "one"
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = read_trace(file, "key")
        assert found is None or same(found, a_trace()), place  # a byte of an unused name may change undetected
        file.write_bytes(whole[:place])
        assert read_trace(file, "key") is None, place


def test_a_stored_trace_is_not_made_again_unless_its_file_is_damaged(tmp_path: Path) -> None:
    calls: list[int] = []

    def create() -> ExecutionTrace:
        calls.append(1)
        return a_trace()

    cache = TraceCache(tmp_path / "new" / "folder", {"torch": "1"}, RecordingSink())
    assert same(cache.get_or_create({"a": 1}, create), cache.get_or_create({"a": 1}, create)) and len(calls) == 1
    cache.get_or_create({"a": 2}, create)
    TraceCache(tmp_path / "new" / "folder", {"torch": "2"}, RecordingSink()).get_or_create({"a": 1}, create)
    assert len(calls) == 3
    for file in (tmp_path / "new" / "folder").iterdir():
        file.write_bytes(b"nothing")
    later = TraceCache(tmp_path / "new" / "folder", {"torch": "1"}, RecordingSink())
    assert same(later.get_or_create({"a": 1}, create), a_trace()) and len(calls) == 4
    TraceCache(tmp_path / "new" / "folder", {"torch": "1"}, RecordingSink()).get_or_create({"a": 1}, create)
    assert len(calls) == 4


def test_a_folder_that_cannot_be_written_gives_a_warning_and_the_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    sink = RecordingSink()
    assert same(TraceCache(tmp_path / "file" / "below", {}, sink).get_or_create({}, a_trace), a_trace())
    assert any(isinstance(event, WarningEvent) and "cannot be written" in event.message for event in sink.events)


def test_the_oldest_of_many_traces_are_removed(tmp_path: Path) -> None:
    for number in range(MAX_FILES):
        (tmp_path / f"{number}.safetensors").write_bytes(b"old")
        os.utime(tmp_path / f"{number}.safetensors", (number, number))
    TraceCache(tmp_path, {}, RecordingSink()).get_or_create({}, a_trace)
    left = {file.name for file in tmp_path.iterdir()}
    assert len(left) == MAX_FILES and "0.safetensors" not in left and "1.safetensors" in left


def test_the_versions_cover_everything_that_runs_in_a_trace() -> None:
    versions = program_versions()
    assert {"torch", "diffusers", "peft", "supertuner"} <= set(versions) and versions == program_versions()
    files = {file.relative_to(PACKAGE).as_posix() for file in package_source_files()}
    assert {"models/spec.py", "optim/schedule.py", "step/train_step.py", "plan/trace/recorder.py"} <= files


@pytest.fixture(scope="module")
def wan(tiny_wan: ModelSource) -> tuple[Family, ModelDescription]:
    family = family_of("wan2.2")
    return family, family.read_model(tiny_wan)


MEDIA = (3, 5, 32, 48)


@pytest.fixture(scope="module")
def shape(wan: tuple[Family, ModelDescription]) -> BatchShape:
    return EncoderShapeProbe(RunConfig(), *wan).batch_shape(1, MEDIA)


def training_files(
    folder: Path, wan: tuple[Family, ModelDescription], shape: BatchShape, experts: tuple[Expert, ...], **blocks: Any
) -> int:
    config = RunConfig.model_validate(blocks)
    traces = CachedTraces(TraceCache(folder, {}, RecordingSink()), config, *wan, PLAIN_CPU)
    for expert in experts:
        trace = traces.training(expert, shape)
        assert trace.phase == f"train {expert.name}"
    return len(list(folder.iterdir()))


def test_equal_experts_share_a_trace_and_values_do_not_matter(
    tmp_path: Path, wan: tuple[Family, ModelDescription], shape: BatchShape
) -> None:
    high, low = wan[1].experts
    assert training_files(tmp_path, wan, shape, (high, low)) == 1
    assert training_files(tmp_path, wan, shape, (high,), optimizer={"learning_rate": 0.5}, run={"seed": 3}) == 1
    assert training_files(tmp_path, wan, shape, (high,), adapter={"rank": 2}) == 2
    assert training_files(tmp_path, wan, shape, (high, low), adapter={"low_noise": {"rank": 3}}) == 3


def test_encoders_and_samples_are_traced_with_everything_in_memory(
    tmp_path: Path, wan: tuple[Family, ModelDescription], shape: BatchShape
) -> None:
    family, model = wan
    config = RunConfig.model_validate({"model": {"experts": "low_noise"}})
    traces = CachedTraces(TraceCache(tmp_path, {}, RecordingSink()), config, *wan, PLAIN_CPU)
    media = trace_media_encoding(family, model, MEDIA)
    text = trace_text_encoding(config, family, model)
    sample = trace_sampling(config, family, model, shape)
    weights = [int(one.nbytes[one.kind == TensorKind.FROZEN].sum()) for one in (media, text, sample)]
    assert weights[0] > 0 and weights[1] > 0 and weights[2] > sum(weights[:2])
    assert {name.partition(".")[0] for name in sample.blocks[1:-1]} == {"transformer", "transformer_2"}
    assert (
        sample.nbytes[sample.kind == TensorKind.STATE].sum() > 0
        and sample.nbytes[sample.kind == TensorKind.TRAINED].sum() > 0
    )
    assert sample.nbytes[sample.kind == TensorKind.GRADIENT].sum() == 0
    parts = dict(sample.work_by_part)
    assert (
        sample_work(sample, 4).matmul_flops
        == parts[ENCODE_AND_DECODE].matmul_flops + 4 * parts[PREDICTION].matmul_flops
    )
    again = traces.sampling(shape)
    assert dict(again.work_by_part)[PREDICTION] == parts[PREDICTION]
    assert same(traces.sampling(shape), again)
    assert same(traces.media(MEDIA), media)
    assert same(traces.text(), text)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_untrained_expert_of_a_sample_has_8_bit_weights_like_a_trained_one(
    wan: tuple[Family, ModelDescription], shape: BatchShape
) -> None:
    blocks = [{"experts": experts, "base_weights": "int8"} for experts in ("all", "low_noise")]
    traces = [trace_sampling(RunConfig.model_validate({"model": one}), *wan, shape) for one in blocks]
    both, one = (trace.live_bytes_by_kind(0)[TensorKind.FROZEN] for trace in traces)
    assert both == one


def test_the_trace_of_loading_is_stored_with_the_bytes_that_are_copied(
    tmp_path: Path, wan: tuple[Family, ModelDescription]
) -> None:
    config = RunConfig.model_validate({"model": {"base_weights": "int8"}})
    traces = [CachedTraces(TraceCache(tmp_path, {}, RecordingSink()), config, *wan, PLAIN_CPU) for _ in range(2)]
    first, again = (one.loading(wan[1].experts[0]) for one in traces)
    assert same(first, again) and first.work_by_part == again.work_by_part
    assert len(list(tmp_path.iterdir())) == 1
