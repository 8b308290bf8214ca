"""CacheStore: fills missing entries once, finds them by key, and never serves stale or damaged ones."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from supertuner.cache.entries import MISSING_REF, EntryRequest
from supertuner.cache.keys import CacheNamespace
from supertuner.cache.repair import copying_request, repair_entries
from supertuner.cache.store import FillStopped
from supertuner.core.errors import CacheError
from supertuner.core.events import WarningEvent
from supertuner.core.host import HostFacts
from tests.cache.store_helpers import NAMESPACE, CountingEncoder, contents, context, same, store
from tests.data.staging import RecordingSink


def test_entries_come_back_bit_for_bit_and_stacked(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(10))
    with store(tmp_path / "home") as filled:
        assert filled.fill(encoder.request()) == 10
    with store(tmp_path / "home") as reopened:
        refs = reopened.find(encoder.keys)
        assert all(same(reopened.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
        batch = reopened.entries.gather(refs[[7, 2, 2, 9]])
        assert torch.equal(batch["latents"], torch.stack([encoder.entry(i)["latents"] for i in (7, 2, 2, 9)]))
        assert batch["latents"].is_contiguous() and batch["latents"].dtype == torch.bfloat16


def test_only_new_entries_are_made_and_equal_contents_share_one(tmp_path: Path) -> None:
    with store(tmp_path / "home") as first:
        first.fill(CountingEncoder(contents(5)).request())
    grown = CountingEncoder([*contents(8), *contents(8)])
    with store(tmp_path / "home") as second:
        assert second.fill(grown.request()) == 3
        assert grown.made == contents(8)[5:]
        assert second.fill(grown.request()) == 0
        refs = second.find(grown.keys)
        batch = second.entries.gather(refs)  # from two arenas
        assert torch.equal(batch["latents"], torch.stack([grown.entry(i)["latents"] for i in range(16)]))


@pytest.mark.parametrize("field", ["kind", "encoder_fingerprint", "dtype", "version"])
def test_every_field_of_the_namespace_changes_the_key(tmp_path: Path, field: str) -> None:
    changed = dataclasses.replace(NAMESPACE, **{field: 2 if field == "version" else "other"})
    with store(tmp_path / "home") as filled:
        filled.fill(CountingEncoder(contents(3)).request())
        assert (filled.find(changed.entry_keys(contents(3))) == MISSING_REF).all()
        assert (filled.find(NAMESPACE.entry_keys(contents(3))) != MISSING_REF).all()


def test_content_and_transform_change_the_key() -> None:
    keys = {bytes(key) for key in (*NAMESPACE.entry_keys([b"a", b"b"]), *NAMESPACE.entry_keys([b"a", b"b"], b"crop"))}
    assert len(keys) == 4
    assert NAMESPACE.entry_keys([b"bc"], b"a")[0] != NAMESPACE.entry_keys([b"c"], b"ab")[0]


def test_two_encoders_share_a_folder_and_do_not_see_each_other_s_entries(tmp_path: Path) -> None:
    other = CacheNamespace("latents", "encoder-2", "bfloat16")
    mine, theirs = CountingEncoder(contents(3)), CountingEncoder(contents(3), other)
    with store(tmp_path / "home") as one, store(tmp_path / "home", other) as two:
        one.fill(mine.request())
        before = sorted(os.listdir(tmp_path / "home"))
        two.fill(theirs.request())
        assert set(before) < set(os.listdir(tmp_path / "home"))
        assert (one.find(theirs.keys) == MISSING_REF).all()


def test_a_stopped_fill_continues_where_it_stopped(tmp_path: Path) -> None:
    encoder, calls = CountingEncoder(contents(10)), iter(range(100))
    with store(tmp_path / "home") as filled:
        with pytest.raises(FillStopped):
            filled.fill(encoder.request(), stop=lambda: next(calls) >= 4)
        made = list(encoder.made)
        assert filled.fill(encoder.request()) == 6
    assert made == contents(10)[:5] and encoder.made == [*made, *contents(10)[4:]], (
        "only the uncommitted entry is made twice"
    )


def test_the_unfinished_arena_of_a_stopped_fill_can_be_removed(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(3))
    with store(tmp_path / "home") as filled:
        with pytest.raises(FillStopped):
            filled.fill(encoder.request(), stop=lambda: len(encoder.made) > 1)
        filled.remove_unfinished()
    assert [name for name in os.listdir(tmp_path / "home") if not name.startswith(".")] == []


def test_an_encoder_that_fails_keeps_the_committed_entries(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(6))

    def failing(indices):
        for number, made in enumerate(encoder.make(indices)):
            if number == 3:
                raise CacheError("the encoder broke")
            yield made

    with store(tmp_path / "home") as filled:
        with pytest.raises(CacheError, match="broke"):
            filled.fill(EntryRequest(encoder.keys, failing))
        assert filled.fill(encoder.request()) == 3


def test_two_threads_that_fill_the_same_store_make_each_entry_once(tmp_path: Path) -> None:
    encoders = [CountingEncoder(contents(40)), CountingEncoder(contents(40))]

    def work(encoder: CountingEncoder) -> None:
        with store(tmp_path / "home") as filled:
            filled.fill(encoder.request())
            assert (filled.find(encoder.keys) != MISSING_REF).all()

    threads = [threading.Thread(target=work, args=(encoder,)) for encoder in encoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(encoders[0].made) + len(encoders[1].made) == 40


def test_a_cache_that_will_not_fit_is_refused_after_the_first_entry(tmp_path: Path) -> None:
    class Small(HostFacts):
        def free_bytes(self, folder: Path) -> int:
            return 1 << 20

    encoder = CountingEncoder(contents(200), shape=(64, 64))
    with store(tmp_path / "home", run_context=context(tmp_path, host=Small())) as filled:
        with pytest.raises(CacheError) as caught:
            filled.fill(encoder.request())
        assert "200 entries need about" in str(caught.value) and "are missing" in str(caught.value)
        assert "cache_config.cache_dir" in str(caught.value)
        assert len(encoder.made) == 1


def test_relative_sizes_predict_the_bytes_of_larger_entries(tmp_path: Path) -> None:
    class Small(HostFacts):
        def free_bytes(self, folder: Path) -> int:
            return 100 << 20

    encoder = CountingEncoder(contents(2))
    sizes = np.array([1.0, 1e6])
    with (
        store(tmp_path / "home", run_context=context(tmp_path, host=Small())) as filled,
        pytest.raises(CacheError, match="does not fit"),
    ):
        filled.fill(EntryRequest(encoder.keys, encoder.make, lambda indices: sizes[indices]))


def flip_a_byte(home: Path, needle: torch.Tensor) -> None:
    """Damage the stored bytes of one tensor."""
    target = needle.contiguous().view(torch.uint8).numpy().tobytes()
    for file in home.glob("*/*.data"):
        content = bytearray(file.read_bytes())
        at = content.find(target)
        if at >= 0:
            content[at] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError("no arena contains those bytes")


def test_copying_reports_a_damaged_entry_and_makes_it_again(tmp_path: Path) -> None:
    encoder, sink = CountingEncoder(contents(6)), RecordingSink()
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request())
    flip_a_byte(tmp_path / "disk", encoder.entry(3)["latents"])
    again = CountingEncoder(contents(6))
    reporting = context(tmp_path, sink=sink)
    with store(tmp_path / "disk", run_context=reporting) as disk, store(tmp_path / "ram", life="run") as ram:
        ram.fill(copying_request(disk, again.request()))
        assert again.made == [contents(6)[3]]
        refs = ram.find(encoder.keys)
        assert all(same(ram.entries.entry(int(ref)), encoder.entry(i)) for i, ref in enumerate(refs))
    assert ".data" in sink.warnings() and "made again" in sink.warnings()
    third = CountingEncoder(contents(6))
    with store(tmp_path / "disk") as disk, store(tmp_path / "ram", life="run") as ram:
        ram.fill(copying_request(disk, third.request()))
        assert third.made == [], "the repaired entry is found instead of the damaged one"


def test_repair_makes_damaged_entries_of_a_store_again(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(4))
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request())
        assert repair_entries(disk, encoder.request()) == 0
    flip_a_byte(tmp_path / "disk", encoder.entry(1)["latents"])
    with store(tmp_path / "disk", verify="always") as disk:
        assert repair_entries(disk, encoder.request()) == 1
        assert same(disk.entries.entry(int(disk.find(encoder.keys)[1])), encoder.entry(1))


def test_reading_a_damaged_entry_raises_an_error_with_file_and_remedy(tmp_path: Path) -> None:
    encoder = CountingEncoder(contents(4))
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request())
    flip_a_byte(tmp_path / "disk", encoder.entry(2)["latents"])
    with store(tmp_path / "disk", verify="always", damage_remedy="build it again") as disk:
        refs = disk.find(encoder.keys)
        disk.entries.gather(refs[[0, 1, 3]])
        with pytest.raises(CacheError, match=r"\.data: .*; build it again"):
            disk.entries.gather(refs)
        with pytest.raises(CacheError, match="build it again"):
            disk.entries.entry(int(refs[2]))


def test_an_arena_with_a_damaged_index_is_reported_and_its_entries_are_made_again(tmp_path: Path) -> None:
    encoder, sink = CountingEncoder(contents(4)), RecordingSink()
    with store(tmp_path / "disk") as disk:
        disk.fill(encoder.request())
    index = next((tmp_path / "disk").glob("*/index"))
    content = bytearray(index.read_bytes())
    content[-10] ^= 1
    index.write_bytes(content)
    with store(tmp_path / "disk", run_context=context(tmp_path, sink=sink)) as disk:
        assert disk.fill(encoder.request()) == 4
    assert any(isinstance(event, WarningEvent) and "index" in event.message for event in sink.events)


def test_entries_of_life_run_are_removed_when_the_last_store_closes(tmp_path: Path) -> None:
    with store(tmp_path / "ram", life="run") as ram:
        ram.fill(CountingEncoder(contents(3)).request())
        with store(tmp_path / "ram", life="run") as other:
            assert len(other.entries) == 3
    assert [name for name in os.listdir(tmp_path / "ram") if not name.startswith(".")] == []


def test_entries_of_audio_are_stored_like_those_of_any_media(tmp_path: Path) -> None:
    """float32 [B, C, T] in, latents out. No audio family exists yet, so the encoder is a function."""
    sounds = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 2, 4000)).astype(np.float32))

    def encode(media_BCT: torch.Tensor) -> dict[str, torch.Tensor]:
        frames = media_BCT.unfold(-1, 400, 400)
        return {"latents": frames.mean(-1).to(torch.bfloat16), "seconds": torch.full((len(media_BCT),), 0.25)}

    def make(indices):
        for number in indices.tolist():
            yield number, {name: tensor[0] for name, tensor in encode(sounds[number : number + 1]).items()}

    keys = NAMESPACE.entry_keys([sound.numpy().tobytes() for sound in sounds])
    with store(tmp_path / "home") as filled:
        filled.fill(EntryRequest(keys, make))
        batch = filled.entries.gather(filled.find(keys)[[4, 0]])
    expected = encode(sounds[[4, 0]])
    assert batch["latents"].shape == (2, 2, 10) and torch.equal(batch["latents"], expected["latents"])
    assert torch.equal(batch["seconds"], expected["seconds"])


def test_on_attach_is_called_for_every_arena_that_is_sealed_or_opened(tmp_path: Path) -> None:
    ranges: list[tuple[int, int]] = []
    encoder = CountingEncoder(contents(10))
    with store(tmp_path / "home", on_attach=lambda *memory: ranges.append(memory)) as filled:
        assert ranges == []
        filled.fill(encoder.request())
        assert len(ranges) == 1
    with store(tmp_path / "home", on_attach=lambda *memory: ranges.append(memory)) as reopened:
        (begin, nbytes) = ranges[1]
        for ref in reopened.find(encoder.keys):
            for tensor in reopened.entries.entry(int(ref)).values():
                assert begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= begin + nbytes
        reopened.fill(CountingEncoder(contents(12)).request())
        assert len(ranges) == 3
