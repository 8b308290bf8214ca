"""Checks every file and caption of the datasets, by staging them as the run does; the run then reuses the arenas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from supertuner.api.session import arena_lifetime
from supertuner.arena.run_context import RunContext
from supertuner.config.settings.data import DatasetSettings
from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import SuperTunerError
from supertuner.core.types import bytes_text
from supertuner.data.batching.captions import possible_captions
from supertuner.data.corpus import CorpusDataset, build_corpus
from supertuner.data.corpus_loader import dataset_stagers
from supertuner.data.ordering.bucket_members import assign_buckets
from supertuner.data.staging.result import StageResult
from supertuner.data.staging.staged_dataset import StagedDataset
from supertuner.tools.doctor.check_result import CheckResult, bad, good, warning
from supertuner.tools.trial.findings import WarningCollector, first_names, from_error

GROUP = "data"


@dataclass(slots=True)
class DataFindings:
    """What the checks of all datasets found."""

    checks: list[CheckResult] = field(default_factory=list)
    captions: dict[str, str] = field(default_factory=dict)
    """Caption, as the text encoder gets it → the first sample that has it."""


def check_datasets(config: RunConfig, context: RunContext) -> DataFindings:
    """Stage every dataset, and report broken files, missing captions and samples that are not used."""
    findings = DataFindings()
    collector = WarningCollector(GROUP)
    quiet = RunContext(context.run_dir, collector, context.progress, context.host)
    for stager, dataset, key_path in dataset_stagers(config, quiet, arena_lifetime(config)):
        try:
            result, staged = stager.open(dataset, key_path)
            with staged:
                findings.checks += _check_dataset(config, dataset, result, staged, collector)
                _collect_captions(dataset, staged, findings.captions)
        except SuperTunerError as error:
            findings.checks.append(from_error(GROUP, f"datasets[{dataset.id}]", error))
    findings.checks += collector.warnings
    return findings


def _check_dataset(
    config: RunConfig, dataset: DatasetSettings, result: StageResult, staged: StagedDataset, collector: WarningCollector
) -> Iterator[CheckResult]:
    from supertuner.train.run.loss_weights import build_loss_weights

    name = f"datasets[{dataset.id}]"
    how = "staged earlier" if result.reused else f"staged in {result.seconds:.1f} s"
    captioned = result.files - result.without_caption
    size = f"{result.files} {result.kind} files ({bytes_text(result.nbytes)})"
    yield good(GROUP, name, f"{size}, {captioned} with a caption; {how}, and the run reuses them")
    if result.set_aside:
        reasons = first_names([f"{one.file}: {one.reason}" for one in result.set_aside])
        text = f"{len(result.set_aside)} of {result.files + len(result.set_aside)} files are broken: {reasons}"
        yield warning(GROUP, name, text, "repair or remove them; `supertuner stage` lists all in set_aside.jsonl")
    if result.without_caption and dataset.captions.source != "none":
        missing = [staged.key(sample) for sample in range(len(staged)) if not staged.captions(sample)]
        text = f"{len(missing)} of {result.files} files have no caption: {first_names(missing)}"
        remedy = f"write a {dataset.captions.extension} file beside each, or set captions.constant"
        yield warning(GROUP, name, text, f'{remedy}; captions.source: "none" if this is intended')
    members = assign_buckets(dataset, staged)
    unused = [f"{one.file}: {one.reason}" for one in CorpusDataset(dataset, staged, members).unassigned_samples()]
    if unused:
        text = f"{len(unused)} of {result.files} samples fit no bucket and are not used: {first_names(unused)}"
        report = bad if len(unused) == result.files else warning
        yield report(GROUP, name, text, f"change resolution, frames or upscale of {name}, or remove the files")
    if len(unused) < result.files:
        # SourceError: a reference image is missing, or masks or weights are unusable.
        corpus = build_corpus([(dataset, staged)], seed=config.run.seed, batch_size=1, assign=lambda *_: members)
        build_loss_weights(corpus, collector)


def _collect_captions(dataset: DatasetSettings, staged: StagedDataset, captions: dict[str, str]) -> None:
    in_order = dataset.captions.model_copy(update={"shuffle_tags": False})  # another order is as long
    for sample in range(len(staged)):
        for caption in possible_captions(staged.captions(sample), in_order):
            captions.setdefault(caption, f"{dataset.id}: {staged.key(sample)}")
