"""Staging budgets: the tightest limit applies, messages state the missing bytes, and no arena remains."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supertuner.core.errors import DoesNotFitError
from supertuner.core.types import GIB, MIB
from supertuner.data.staging.budget import (
    StagingBudget,
    StagingCapacity,
    compute_budget,
    file_system_type,
    lowered_memory_limit,
    memory_limit_bytes,
    require_fits,
    reserved_memory_bytes,
    stored_bytes,
)
from supertuner.data.staging.budget_meter import BudgetMeter
from tests.data.media_files import picture, write
from tests.data.staging import RecordingSink, contents, dataset, machine, names, stager

sizes = st.integers(0, 1 << 45)


def capacity(**known):
    return StagingCapacity(
        **{
            "in_memory": True,
            "free_bytes": 1 << 50,
            "memory_total": None,
            "memory_available": None,
            "limit_bytes": None,
        }
        | known
    )


def test_memory_limit_gb_counts_units_of_two_to_the_thirty_bytes():
    assert memory_limit_bytes(2) == 2 * 2**30 and memory_limit_bytes(0.5) == 2**29 and memory_limit_bytes(None) is None


@given(sizes, sizes, sizes, sizes)
def test_the_tightest_bound_applies(free, total, available, limit):
    budget = compute_budget(
        capacity(free_bytes=free, memory_total=total, memory_available=available, limit_bytes=limit)
    )
    assert budget.nbytes == min(free, max(0, available - reserved_memory_bytes(total)), limit)


@given(sizes, sizes, sizes)
def test_only_its_free_space_limits_a_disk(free, available, limit):
    budget = compute_budget(capacity(in_memory=False, free_bytes=free, memory_available=available, limit_bytes=limit))
    assert budget.nbytes == free


def test_only_a_limit_above_the_machine_s_memory_is_lowered():
    assert lowered_memory_limit(
        capacity(limit_bytes=360 * GIB, memory_total=24 * GIB)
    ) == 24 * GIB - reserved_memory_bytes(24 * GIB)
    assert lowered_memory_limit(capacity(limit_bytes=10 * GIB, memory_total=24 * GIB)) is None
    assert lowered_memory_limit(capacity(limit_bytes=360 * GIB, memory_total=None)) is None


def test_the_message_states_needed_and_missing_bytes_and_the_remedy():
    with pytest.raises(DoesNotFitError) as caught:
        require_fits("cats", 3 * GIB, 1200, compute_budget(capacity(limit_bytes=2 * GIB)))
    text = str(caught.value)
    assert "datasets[cats]" in text and "need 3.0 GiB" in text and "1.0 GiB are missing" in text
    assert "in_memory.memory_limit_gb" in text and "raise it" in text and 'compression: "auto"' in text


@given(st.integers(1, 1 << 40))
def test_files_occupy_whole_pages(nbytes):
    assert nbytes <= stored_bytes(nbytes) < nbytes + 4096 and stored_bytes(nbytes) % 4096 == 0


def test_the_file_system_of_the_longest_mount_point_is_found():
    mounts = (
        "1 0 0:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /dev/shm rw shared:4 - tmpfs tmpfs rw\n"
        "3 1 0:3 / /dev/shm/with\\040space rw - xfs /dev/b rw\n"
    )
    types = [file_system_type(mounts, path) for path in ("/dev/shm/x", "/dev/shmx", "/home", "/dev/shm/with space/y")]
    assert types == ["tmpfs", "ext4", "ext4", "xfs"]


def pictures(count, side=64):
    return {f"{i:03d}.jpg": picture("jpeg", (side, side), seed=i) for i in range(count)}


@pytest.fixture
def folders(tmp_path):
    """A folder with about 800 KiB of images, and a home."""
    (tmp_path / "home").mkdir(mode=0o700)
    return write(tmp_path / "set", pictures(200)), tmp_path / "home"


def large_machine(tmp_path, home, **less):
    return machine(tmp_path / "machine", **{"total": 64 * GIB, "available": 60 * GIB, "tmpfs": home, **less})


@pytest.mark.parametrize(
    ("less", "settings", "message"),
    [
        ({}, {"memory_limit_gb": 0.0005}, "are allowed by in_memory.memory_limit_gb; .* are missing; raise it"),
        ({"available": 3 * GIB}, {}, "MemAvailable or cgroup"),
        ({"cgroup": 512 * 1024}, {}, "MemAvailable or cgroup"),
    ],
)
def test_a_dataset_known_not_to_fit_is_refused_before_copying(tmp_path, folders, less, settings, message):
    folder, home = folders
    if less.get("available"):
        less = {"available": reserved_memory_bytes(64 * GIB) + 100_000}
    sink = RecordingSink()
    with pytest.raises(DoesNotFitError, match=message) as caught:
        stager(home, sink, large_machine(tmp_path, home, **less)).stage(dataset(folder, in_memory=settings))
    assert "are missing" in str(caught.value)
    assert not any(title.startswith("staging") for title, _, _ in sink.phases)
    assert names(home) == []


def test_the_limit_applies_to_the_stored_bytes_within_one_percent(tmp_path, folders):
    folder, home = write(tmp_path / "larger", pictures(60, side=256)), folders[1]
    host = large_machine(tmp_path, home)
    free = stager(home, host=host).stage(dataset(folder, id="free"))
    exact = free.stored_bytes / GIB
    assert stager(home, host=host).stage(dataset(folder, in_memory={"memory_limit_gb": exact * 1.01})).files == 60
    with pytest.raises(DoesNotFitError):
        stager(home, host=host).stage(dataset(folder, id="b", in_memory={"memory_limit_gb": exact * 0.99}))


def test_compressed_files_above_the_limit_end_staging_with_an_estimate_of_the_missing_bytes(tmp_path, folders):
    folder, home = folders
    sink = RecordingSink()
    settings = {"compression": "zstd", "memory_limit_gb": 0.0005}
    with pytest.raises(DoesNotFitError, match=r"need about .* are missing"):
        stager(home, sink, large_machine(tmp_path, home)).stage(dataset(folder, in_memory=settings))
    assert any(title.startswith("staging") for title, _, _ in sink.phases)
    assert names(home) == []


def test_staging_stops_if_other_programs_use_the_memory(tmp_path, folders):
    folder, home = folders
    write(folder, {f"big{i}.png": picture("png", (1200, 1000), seed=i) for i in range(3)})
    for i in range(30):
        os.link(folder / "big0.png", folder / f"more{i}.png")
    host = large_machine(tmp_path, home)

    def when(title):
        if title.startswith("staging"):
            (tmp_path / "machine/proc/meminfo").write_text(f"MemTotal: {64 * MIB} kB\nMemAvailable: 1000 kB\n")

    with pytest.raises(DoesNotFitError, match=r"only 1000 KiB of memory are still available.*are missing"):
        stager(home, RecordingSink(when), host).stage(dataset(folder))
    assert names(home) == []


def test_a_limit_above_the_machine_s_memory_is_lowered_with_a_warning(tmp_path, folders):
    folder, home = folders
    sink = RecordingSink()
    result = stager(home, sink, large_machine(tmp_path, home)).stage(
        dataset(folder, in_memory={"memory_limit_gb": 360})
    )
    assert result.files == 200
    assert "memory_limit_gb is 360, but this machine can provide 62.0 GiB; lowered" in sink.warnings()
    assert sink.decisions()["datasets[set].in_memory.memory_limit_gb"] == 62.0


def test_an_in_memory_dataset_with_a_home_on_a_disk_causes_a_warning(tmp_path, folders):
    folder, home = folders
    sink = RecordingSink()
    host = machine(tmp_path / "machine", total=64 * GIB, available=0, tmpfs=tmp_path / "set")
    stager(home, sink, host).stage(dataset(folder, in_memory={"memory_limit_gb": 0.0001}))
    assert "is on a disk; set one on tmpfs" in sink.warnings() and "has no effect" in sink.warnings()


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zlib", "zstd"])
def test_a_configured_codec_is_used_with_a_warning_if_it_gains_nothing(tmp_path, folders, codec):
    folder, home = folders
    sink = RecordingSink()
    result = stager(home, sink).stage(dataset(folder, in_memory={"compression": codec}))
    assert result.formats["jpeg"]["codec"] == codec
    assert f"{codec} gains nothing on jpeg" in sink.warnings()
    assert {k: v[0] for k, v in contents(home, result.arena).items()} == {
        path.stem: path.read_bytes() for path in folder.iterdir()
    }


def test_the_estimate_counts_the_overhead_once():
    meter = BudgetMeter(
        "set",
        StagingBudget(10 * MIB, "are free", "raise it"),
        None,
        files=100,
        raw_total=100 * MIB,
        overhead_bytes=9 * MIB,
    )
    meter.charge(raw_bytes=MIB, nbytes=MIB // 2)
    with pytest.raises(DoesNotFitError, match=r"need about 59\.0 MiB, .* about 49\.0 MiB are missing"):
        meter.charge(raw_bytes=MIB, nbytes=MIB // 2 + 1)
