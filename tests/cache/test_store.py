"""A store of entries: filled once, found by key, grown by what is new, never serving what is stale or damaged."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from supertuner.cache.entries import MISSING_REF
from supertuner.cache.fill import EntryRequest, FillStopped
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.repair import copying_request, repair_entries
from supertuner.core.errors import CacheError
from supertuner.core.events import NullSink, WarningEvent
from supertuner.core.host import HostFacts
from tests.cache.making import SPACE, CountingEncoder, contents, same, store
from tests.data.staging import RecordingSink

QUIET = {"host": HostFacts(), "progress": NullSink()}


def test_entries_come_back_bit_for_bit_and_stacked(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(10))
    with store(tmp_path / "home") as filled:
        assert filled.fill(encoder.request(), **QUIET) == 10
    with store(tmp_path / "home") as found:
        refs = found.find(encoder.keys)
        assert all(same(found.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        batch = found.entries.gather(refs[[7, 2, 2, 9]])
        assert torch.equal(batch["latents"], torch.stack([encoder.entry(i)["latents"] for i in (7, 2, 2, 9)]))
        assert batch["latents"].is_contiguous() and batch["latents"].dtype == torch.bfloat16


def test_only_what_is_new_is_encoded_and_equal_contents_once(tmp_path: Path) -> None:
    with store(tmp_path / "home") as first:
        first.fill(CountingEncoder(contents(5)).request(), **QUIET)
    grown = CountingEncoder([*contents(8), *contents(8)])
    with store(tmp_path / "home") as second:
        assert second.fill(grown.request(), **QUIET) == 3
        assert grown.made == contents(8)[5:]
        assert second.fill(grown.request(), **QUIET) == 0
        refs = second.find(grown.keys)
        batch = second.entries.gather(refs)  # from two arenas
        assert torch.equal(batch["latents"], torch.stack([grown.entry(i)["latents"] for i in range(16)]))


@pytest.mark.parametrize("ingredient", ["what", "identity", "dtype", "version"])
def test_another_ingredient_of_the_space_is_another_key_and_nothing_is_found(tmp_path: Path, ingredient: str) -> None:
    changed = dataclasses.replace(SPACE, **{ingredient: 2 if ingredient == "version" else "other"})
    with store(tmp_path / "home") as filled:
        filled.fill(CountingEncoder(contents(3)).request(), **QUIET)
        assert (filled.find(changed.entry_keys(contents(3))) == MISSING_REF).all()
        assert (filled.find(SPACE.entry_keys(contents(3))) != MISSING_REF).all()


def test_another_content_or_transform_is_another_key() -> None:
    keys = {bytes(key) for key in (*SPACE.entry_keys([b"a", b"b"]), *SPACE.entry_keys([b"a", b"b"], b"crop"))}
    assert len(keys) == 4
    assert SPACE.entry_keys([b"bc"], b"a")[0] != SPACE.entry_keys([b"c"], b"ab")[0]


def test_stores_of_two_encoders_share_a_folder_and_never_touch_each_other(tmp_path: Path) -> None:
    other = CacheNamespace("latents", "encoder-2", "bfloat16")
    mine, theirs = CountingEncoder(contents(3)), CountingEncoder(contents(3), other)
    with store(tmp_path / "home") as one, store(tmp_path / "home", other) as two:
        one.fill(mine.request(), **QUIET)
        before = sorted(os.listdir(tmp_path / "home"))
        two.fill(theirs.request(), **QUIET)
        assert set(before) < set(os.listdir(tmp_path / "home"))
        assert (one.find(theirs.keys) == MISSING_REF).all()


def test_a_fill_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    encoder, calls = CountingEncoder(contents(10)), iter(range(100))
    with store(tmp_path / "home") as filled:
        with pytest.raises(FillStopped):
            filled.fill(encoder.request(), **QUIET, stop=lambda: next(calls) >= 4)
        made = list(encoder.made)
        assert filled.fill(encoder.request(), **QUIET) == 6
    assert made == contents(10)[:5] and encoder.made == [*made, *contents(10)[4:]], "only the uncommitted one twice"


def test_what_a_stopped_fill_left_can_be_removed(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(3))
    with store(tmp_path / "home") as filled:
        with pytest.raises(FillStopped):
            filled.fill(encoder.request(), **QUIET, stop=lambda: len(encoder.made) > 1)
        filled.remove_unfinished()
    assert [name for name in os.listdir(tmp_path / "home") if not name.startswith(".")] == []


def test_an_encoder_that_fails_leaves_what_was_committed(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(6))

    def failing(places):
        for number, made in enumerate(encoder.make(places)):
            if number == 3:
                raise CacheError("the encoder broke")
            yield made

    with store(tmp_path / "home") as filled:
        with pytest.raises(CacheError, match="broke"):
            filled.fill(EntryRequest(encoder.keys, failing), **QUIET)
        assert filled.fill(encoder.request(), **QUIET) == 3


def test_two_threads_that_want_the_same_encode_it_once(tmp_path: Path) -> None:
    encoders = [CountingEncoder(contents(40)), CountingEncoder(contents(40))]

    def work(encoder: CountingEncoder) -> None:
        with store(tmp_path / "home") as filled:
            filled.fill(encoder.request(), **QUIET)
            assert (filled.find(encoder.keys) != MISSING_REF).all()

    threads = [threading.Thread(target=work, args=(encoder,)) for encoder in encoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(encoders[0].made) + len(encoders[1].made) == 40


def test_too_little_room_is_said_after_the_first_entry_with_what_is_missing(tmp_path: Path) -> None:
    class Small(HostFacts):
        def free_bytes(self, folder: Path) -> int:
            return 1 << 20

    encoder = CountingEncoder(contents(200), shape=(64, 64))
    with store(tmp_path / "home") as filled:
        with pytest.raises(CacheError) as caught:
            filled.fill(encoder.request(), host=Small(), progress=NullSink())
        assert "200 entries need about" in str(caught.value) and "are missing" in str(caught.value)
        assert "cache_config.cache_dir" in str(caught.value)
        assert len(encoder.made) == 1


def test_sizes_tell_the_room_of_entries_that_differ(tmp_path: Path) -> None:
    class Small(HostFacts):
        def free_bytes(self, folder: Path) -> int:
            return 100 << 20

    encoder = CountingEncoder(contents(2))
    sizes = np.array([1.0, 1e6])
    with store(tmp_path / "home") as filled, pytest.raises(CacheError, match="does not fit"):
        filled.fill(
            EntryRequest(encoder.keys, encoder.make, lambda places: sizes[places]), host=Small(), progress=NullSink()
        )


def flip_a_byte(home: Path, needle: torch.Tensor) -> None:
    """Damage the stored bytes of one tensor."""
    wanted = needle.contiguous().view(torch.uint8).numpy().tobytes()
    for file in home.glob("*/*.data"):
        content = bytearray(file.read_bytes())
        at = content.find(wanted)
        if at >= 0:
            content[at] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError("those bytes are nowhere")


def test_a_damaged_entry_is_dropped_with_a_warning_and_encoded_again_while_loading(tmp_path: Path) -> None:
    encoder, told = CountingEncoder(contents(6)), RecordingSink()
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request(), **QUIET)
    flip_a_byte(tmp_path / "disk", encoder.entry(3)["latents"])
    again = CountingEncoder(contents(6))
    with store(tmp_path / "disk") as disk, store(tmp_path / "ram", life="run") as ram:
        ram.fill(copying_request(disk, again.request(), sink=told, **QUIET), **QUIET)
        assert again.made == [contents(6)[3]]
        refs = ram.find(encoder.keys)
        assert all(same(ram.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
    assert ".data" in told.warnings() and "made again" in told.warnings()
    third = CountingEncoder(contents(6))
    with store(tmp_path / "disk") as disk, store(tmp_path / "ram", life="run") as ram:
        ram.fill(copying_request(disk, third.request(), sink=RecordingSink(), **QUIET), **QUIET)
        assert third.made == [], "the entry that was made again is the one that is found"


def test_mending_checks_a_store_in_place(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(4))
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request(), **QUIET)
        assert repair_entries(disk, encoder.request(), sink=NullSink(), **QUIET) == 0
    flip_a_byte(tmp_path / "disk", encoder.entry(1)["latents"])
    with store(tmp_path / "disk", verify="always") as disk:
        assert repair_entries(disk, encoder.request(), sink=NullSink(), **QUIET) == 1
        assert same(disk.entries.entry(int(disk.find(encoder.keys)[1])), encoder.entry(1))


def test_a_damaged_entry_of_a_mapped_file_is_an_error_that_names_file_and_remedy(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(4))
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request(), **QUIET)
    flip_a_byte(tmp_path / "disk", encoder.entry(2)["latents"])
    with store(tmp_path / "disk", verify="always", remedy="build it again") as disk:
        refs = disk.find(encoder.keys)
        disk.entries.gather(refs[[0, 1, 3]])
        with pytest.raises(CacheError, match=r"\.data: .*; build it again"):
            disk.entries.gather(refs)
        with pytest.raises(CacheError, match="build it again"):
            disk.entries.entry(int(refs[2]))


def test_an_arena_whose_index_is_damaged_is_told_and_made_anew(tmp_path: Path) -> None:
    encoder, told = CountingEncoder(contents(4)), RecordingSink()
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request(), **QUIET)
    index = next((tmp_path / "disk").glob("*/index"))
    content = bytearray(index.read_bytes())
    content[-10] ^= 1
    index.write_bytes(content)
    with store(tmp_path / "disk", sink=told) as disk:
        assert disk.fill(encoder.request(), **QUIET) == 4
    assert any(isinstance(event, WarningEvent) and "index" in event.message for event in told.events)


def test_a_run_s_entries_end_with_the_run(tmp_path: Path) -> None:
    with store(tmp_path / "ram", life="run") as ram:
        ram.fill(CountingEncoder(contents(3)).request(), **QUIET)
        with store(tmp_path / "ram", life="run") as other:
            assert len(other.entries) == 3
    assert [name for name in os.listdir(tmp_path / "ram") if not name.startswith(".")] == []


def test_sound_passes_like_any_other_media(tmp_path: Path) -> None:
    """float32 BCT in, latents out: no family of sound exists yet, so the encoder is a function."""
    sounds = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 2, 4000)).astype(np.float32))

    def encode(media_BCT: torch.Tensor) -> dict[str, torch.Tensor]:
        frames = media_BCT.unfold(-1, 400, 400)
        return {"latents": frames.mean(-1).to(torch.bfloat16), "seconds": torch.full((len(media_BCT),), 0.25)}

    def make(places):
        for number in places.tolist():
            yield number, {name: one[0] for name, one in encode(sounds[number : number + 1]).items()}

    keys = SPACE.entry_keys([sound.numpy().tobytes() for sound in sounds])
    with store(tmp_path / "home") as filled:
        filled.fill(EntryRequest(keys, make), **QUIET)
        batch = filled.entries.gather(filled.find(keys)[[4, 0]])
    expected = encode(sounds[[4, 0]])
    assert batch["latents"].shape == (2, 2, 10) and torch.equal(batch["latents"], expected["latents"])
    assert torch.equal(batch["seconds"], expected["seconds"])
