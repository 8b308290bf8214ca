"""What a run stores beside the GPU: arithmetic that can be checked by hand, bounds that say so, and honest gaps."""

from __future__ import annotations

from typing import Any

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.types import GIB, MIB, MediaKind
from supertuner.data.ordering.buckets import Bucket
from supertuner.plan.forecast.dataset_sizes import BucketCount, CaptionTotals, DatasetSize
from supertuner.plan.forecast.storage import EncodedSizes, ExpertStateSizes, StorageItem, list_storage, total_storage

SQUARE = Bucket(MediaKind.IMAGE, 1024, 1024, channels=3)
WAN = EncodedSizes(
    latent_bytes=lambda bucket: 16 * bucket.width * bucket.height // 64 * 2,
    token_bytes=8192,
    longest_caption_bytes=4 * MIB,
)


def a_holding(samples: int | None = 260, **more: Any) -> DatasetSize:
    known = {"in_memory": True, "held_out": False, "stored_bytes": 2 * GIB, "known": "by hand", **more}
    captions = known.pop("captions", CaptionTotals(samples or 0, None))
    return DatasetSize(
        "subject", bucket_counts=(BucketCount(SQUARE, samples or 0),), samples=samples, captions=captions, **known
    )


def kept(holding: DatasetSize, **settings: Any) -> dict[str, StorageItem]:
    config = RunConfig.model_validate(settings)
    trained = [ExpertStateSizes("high_noise", 100 * MIB, 200 * MIB, 50 * MIB)]
    return {f"{one.what} {one.where}": one for one in list_storage(config, [holding], WAN, trained, 10 * MIB)}


def test_the_seeds_260_latents_are_130_mebibytes_and_not_gigabytes() -> None:
    latents = kept(a_holding())["cache of latents memory"].nbytes
    assert latents is not None and abs(latents - 260 * 16 * 128 * 128 * 2) < 260 * 4352


def test_captions_are_bounded_by_what_the_model_reads_or_by_their_bytes() -> None:
    most = kept(a_holding())["cache of text memory"]
    assert most.nbytes is not None and 260 * 4 * MIB <= most.nbytes < 261 * 4 * MIB and "at most" in most.how
    short = kept(a_holding(captions=CaptionTotals(260, 260 * 40)))["cache of text memory"].nbytes
    assert short is not None and short <= 260 * (42 * 8192 + 4352)


def test_what_is_kept_is_in_memory_and_on_disk_and_what_is_not_cached_is_nowhere() -> None:
    both = kept(a_holding(), cache_config={"persistent_cache": True})
    assert both["cache of latents, kept disk"].nbytes == both["cache of latents memory"].nbytes
    none = kept(a_holding(), cache_config={"vae_cache_type": "none", "text_cache_type": "disk"})
    assert "cache of latents memory" not in none and "cache of text disk" in none


def test_a_checkpoint_is_written_before_the_oldest_goes() -> None:
    found = kept(a_holding(), checkpoints={"keep": 2})
    assert found["checkpoints disk"].nbytes == 3 * 300 * MIB
    assert found["exports disk"].nbytes == 50 * MIB
    assert found["batches on their way memory"].nbytes == 3 * 10 * MIB


def test_what_is_not_known_is_not_zero() -> None:
    found = kept(a_holding(None, captions=None, stored_bytes=None, known="not here: say --samples N"))
    assert found["cache of latents memory"].nbytes is None and "say --samples N" in found["cache of latents memory"].how
    nbytes, whole = total_storage(found.values(), "memory")
    assert nbytes == 30 * MIB and not whole


def test_variations_are_cached_each() -> None:
    one, three = (kept(a_holding(media_turns=turns))["cache of latents memory"].nbytes for turns in (1, 3))
    assert one is not None and three == 3 * one
