"""What a run stores in host memory and on disk: arithmetic checked by hand, upper limits, and unknown sizes."""

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


def a_dataset(samples: int | None = 260, **more: Any) -> DatasetSize:
    fields = {"in_memory": True, "held_out": False, "stored_bytes": 2 * GIB, "explanation": "by hand", **more}
    captions = fields.pop("captions", CaptionTotals(samples or 0, None))
    return DatasetSize(
        "subject", bucket_counts=(BucketCount(SQUARE, samples or 0),), samples=samples, captions=captions, **fields
    )


def stored(dataset: DatasetSize, steps: int | None = 1000, **settings: Any) -> dict[str, StorageItem]:
    config = RunConfig.model_validate(settings)
    trained = [ExpertStateSizes(100 * MIB, 200 * MIB, 50 * MIB)]
    return {f"{one.what} {one.where}": one for one in list_storage(config, [dataset], WAN, trained, 10 * MIB, steps)}


def test_260_latents_of_1024_pixels_are_130_mebibytes_and_not_gigabytes() -> None:
    latents = stored(a_dataset())["cache of latents memory"].nbytes
    assert latents is not None and abs(latents - 260 * 16 * 128 * 128 * 2) < 260 * 4352


def test_captions_are_limited_by_the_greatest_length_or_by_their_bytes() -> None:
    most = stored(a_dataset())["cache of text memory"]
    assert most.nbytes is not None and 260 * 4 * MIB <= most.nbytes < 261 * 4 * MIB and "at most" in most.how
    short = stored(a_dataset(captions=CaptionTotals(260, 260 * 40)))["cache of text memory"].nbytes
    assert short is not None and short <= 260 * (42 * 8192 + 4352)


def test_a_persistent_cache_is_in_memory_and_on_disk_and_a_disabled_one_in_neither() -> None:
    both = stored(a_dataset(), cache_config={"persistent_cache": True})
    assert both["cache of latents, persistent disk"].nbytes == both["cache of latents memory"].nbytes
    none = stored(a_dataset(), cache_config={"vae_cache_type": "none", "text_cache_type": "disk"})
    assert "cache of latents memory" not in none and "cache of text disk" in none


def test_one_checkpoint_more_than_kept_exists_while_it_is_written() -> None:
    found = stored(a_dataset(), checkpoints={"keep": 2})
    assert found["checkpoints disk"].nbytes == 3 * 300 * MIB
    assert found["prefetched batches memory"].nbytes == 3 * 10 * MIB


def test_exports_are_counted_by_checkpoints_formats_and_weights_up_to_those_kept() -> None:
    def exports(steps: int | None = 1000, **settings: Any) -> int | None:
        return stored(a_dataset(), steps, checkpoints={"every_steps": 300}, **settings)["exports disk"].nbytes

    assert exports() == 4 * 50 * MIB
    assert exports(exports={"formats": ("diffusers", "comfyui")}) == 8 * 50 * MIB
    both = {"weights": "both", "when": "end"}
    assert exports(exports=both) == 50 * MIB and exports(exports=both, train={"ema_decay": 0.9}) == 100 * MIB
    assert exports(exports={"keep": 2}) == exports(None, exports={"keep": 2}) == 3 * 50 * MIB
    assert exports(exports={"keep": 9}) == 4 * 50 * MIB and exports(None) is None
    assert exports(adapter={"type": "full"}) == 50 * MIB, "whole models are exported once"
    assert "exports disk" not in stored(a_dataset(), exports={"when": "never"})


def test_an_unknown_size_is_none_and_the_total_says_that_it_is_incomplete() -> None:
    found = stored(a_dataset(None, captions=None, stored_bytes=None, explanation="not here: give --samples N"))
    assert found["cache of latents memory"].nbytes is None and "--samples N" in found["cache of latents memory"].how
    nbytes, whole = total_storage(found.values(), "memory")
    assert nbytes == 30 * MIB and not whole


def test_each_variation_of_a_sample_is_cached() -> None:
    one, three = (stored(a_dataset(cached_media_variants=count))["cache of latents memory"].nbytes for count in (1, 3))
    assert one is not None and three == 3 * one
