"""Kept traces come back whole or not at all, and are found by what decides them alone."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supertuner.config.settings.tree import RunConfig
from supertuner.core.events import Event, Warned
from supertuner.models.spec import Expert, Family, Model, Source
from supertuner.models.table import family as family_of
from supertuner.plan.placement.step_table import Work
from supertuner.plan.trace import cached_traces as remembered
from supertuner.plan.trace.phases import SampleTrace, trace_media, trace_sampling, trace_text
from supertuner.plan.trace.record import AFTER, BEFORE, Kind, Pass, Stretch, Trace
from supertuner.plan.trace.recorder import Plain
from supertuner.plan.trace.shapes import BatchShape, Shaper
from supertuner.plan.trace.trace_store import MOST, Kept, packed, read, versions


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def a_trace() -> Trace:
    return Trace(
        phase="train model", device="cuda", granule=512, blocks=(BEFORE, "blocks.0", AFTER),
        nbytes=np.array([100, 600, 50]), birth=np.array([0, 1, 2]), death=np.array([5, 4, 3]),
        kind=np.array([Kind.FROZEN, Kind.ACTIVATION, Kind.TEMPORARY], dtype=np.uint8),
        block=np.array([1, 1, 2], dtype=np.int16),
        stretches=(
            Stretch(1, Pass.FORWARD, 0, 2, Work(1.5, 2.0, 3.0, 4), (0, 1)),
            Stretch(2, Pass.BACKWARD, 2, 4, Work(), ()),
        ),
        end=5, inputs=np.array([[1, 1]], dtype=np.int32), micro_batches=3, notes=("one",), parts=(("rest", Work(1.0)),),
    )  # fmt: skip


def same(one: Trace, other: Trace) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Trace))


def test_live_bytes_are_rounded_to_granules_and_follow_births_and_deaths() -> None:
    trace = a_trace()
    assert trace.live().tolist() == [512, 1536, 2048, 1536, 512, 0]
    assert trace.peak() == (2048, 2) and trace.by_kind(2)[Kind.ACTIVATION] == 1024
    assert trace.place(3) == trace.stretches[1]


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(packed(a_trace(), "key"))
    found = read(tmp_path / "one", "key")
    assert found is not None and same(found, a_trace()) and found.stretches == a_trace().stretches


def test_any_flipped_byte_or_cut_is_noticed(tmp_path: Path) -> None:
    whole, file = packed(a_trace(), "key"), tmp_path / "one"
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = read(file, "key")
        assert found is None or same(found, a_trace()), place  # in a name that nobody reads, it may stay unnoticed
        file.write_bytes(whole[:place])
        assert read(file, "key") is None, place


def test_what_is_kept_is_not_made_again_and_damage_is_mended(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> Trace:
        made.append(1)
        return a_trace()

    kept = Kept(tmp_path / "new" / "folder", {"torch": "1"}, Heard())
    assert same(kept.trace({"a": 1}, make), kept.trace({"a": 1}, make)) and len(made) == 1
    kept.trace({"a": 2}, make)
    Kept(tmp_path / "new" / "folder", {"torch": "2"}, Heard()).trace({"a": 1}, make)
    assert len(made) == 3
    for file in (tmp_path / "new" / "folder").iterdir():
        file.write_bytes(b"nothing")
    later = Kept(tmp_path / "new" / "folder", {"torch": "1"}, Heard())
    assert same(later.trace({"a": 1}, make), a_trace()) and len(made) == 4
    Kept(tmp_path / "new" / "folder", {"torch": "1"}, Heard()).trace({"a": 1}, make)
    assert len(made) == 4


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    heard = Heard()
    assert same(Kept(tmp_path / "file" / "below", {}, heard).trace({}, a_trace), a_trace())
    assert any(isinstance(event, Warned) and "cannot be written" in event.message for event in heard.events)


def test_of_many_traces_the_oldest_are_removed(tmp_path: Path) -> None:
    for number in range(MOST):
        (tmp_path / f"{number}.safetensors").write_bytes(b"old")
        os.utime(tmp_path / f"{number}.safetensors", (number, number))
    Kept(tmp_path, {}, Heard()).trace({}, a_trace)
    left = {file.name for file in tmp_path.iterdir()}
    assert len(left) == MOST and "0.safetensors" not in left and "1.safetensors" in left


def test_without_a_folder_everything_is_made_now() -> None:
    assert same(Kept(None, {}, Heard()).trace({}, a_trace), a_trace())


def test_versions_name_what_runs_in_a_trace() -> None:
    found = versions()
    assert {"torch", "diffusers", "peft", "supertuner"} <= set(found) and found == versions()


@pytest.fixture(scope="module")
def wan(tiny_wan: Source) -> tuple[Family, Model]:
    family = family_of("wan2.2")
    return family, family.read(tiny_wan)


MEDIA = (3, 5, 32, 48)


@pytest.fixture(scope="module")
def shape(wan: tuple[Family, Model]) -> BatchShape:
    return Shaper(RunConfig(), *wan).batch(1, MEDIA)


def training_files(
    folder: Path, wan: tuple[Family, Model], shape: BatchShape, experts: tuple[Expert, ...], **blocks: Any
) -> int:
    kept, config = Kept(folder, {}, Heard()), RunConfig.model_validate(blocks)
    for expert in experts:
        trace = remembered.training(kept, config, *wan, expert, shape, device=Plain())
        assert trace.phase == f"train {expert.name}"
    return len(list(folder.iterdir()))


def test_experts_that_are_alike_are_traced_once_and_values_do_not_matter(
    tmp_path: Path, wan: tuple[Family, Model], shape: BatchShape
) -> None:
    high, low = wan[1].experts
    assert training_files(tmp_path, wan, shape, (high, low)) == 1
    assert training_files(tmp_path, wan, shape, (high,), optimizer={"learning_rate": 0.5}, run={"seed": 3}) == 1
    assert training_files(tmp_path, wan, shape, (high,), adapter={"rank": 2}) == 2
    assert training_files(tmp_path, wan, shape, (high, low), adapter={"low_noise": {"rank": 3}}) == 3


def test_encoders_and_samples_are_traced_with_all_that_is_in_memory(
    tmp_path: Path, wan: tuple[Family, Model], shape: BatchShape
) -> None:
    family, model = wan
    config, kept = RunConfig.model_validate({"model": {"experts": "low_noise"}}), Kept(tmp_path, {}, Heard())
    media = trace_media(family, model, MEDIA)
    text = trace_text(config, family, model)
    made = trace_sampling(config, family, model, shape)
    sample = made.trace
    weights = [int(one.nbytes[one.kind == Kind.FROZEN].sum()) for one in (media, text, sample)]
    assert weights[0] > 0 and weights[1] > 0 and weights[2] > sum(weights[:2])
    assert {name.partition(".")[0] for name in sample.blocks[1:-1]} == {"transformer", "transformer_2"}
    assert sample.nbytes[sample.kind == Kind.STATE].sum() > 0 and sample.nbytes[sample.kind == Kind.TRAINED].sum() > 0
    assert sample.nbytes[sample.kind == Kind.GRADIENT].sum() == 0
    assert made.work(4).matmul_flops == made.rest.matmul_flops + 4 * made.prediction.matmul_flops
    again = remembered.sampling(kept, config, family, model, shape, device=Plain())
    assert isinstance(again, SampleTrace) and again.prediction == made.prediction
    assert same(remembered.sampling(kept, config, family, model, shape, device=Plain()).trace, again.trace)
    assert same(remembered.media(kept, family, model, MEDIA, device=Plain()), media)
    assert same(remembered.text(kept, config, family, model, device=Plain()), text)
    assert len(list(tmp_path.iterdir())) == 3
