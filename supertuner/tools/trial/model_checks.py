"""Checks of the full-size model without its weights: access, headers of the weight files, tokenizers and captions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from supertuner.config.settings.run_config import RunConfig
from supertuner.core.errors import ModelError, ModelUnreachableError
from supertuner.core.events import Progress
from supertuner.core.types import bytes_text
from supertuner.models import hub
from supertuner.models.pipeline_files import pending_download_bytes
from supertuner.models.published_models import describe_model
from supertuner.models.spec import Family, ModelDescription
from supertuner.models.weight_headers import WeightFileReport, check_weight_files, components_with_weights
from supertuner.tools.doctor.check_result import CheckResult, CheckStatus, absent, good, warning
from supertuner.tools.trial.findings import from_error
from supertuner.train.run.model_source import TINY_MODEL, open_model

GROUP = "model"
CAPTION_CHARACTERS_SHOWN = 60


@dataclass(slots=True)
class ModelFindings:
    """What the checks of the model found."""

    checks: list[CheckResult] = field(default_factory=list)
    model: ModelDescription | None = None
    """The model as its config files, or the table of published models, describe it; None: neither is here."""
    has_files: bool = False
    """Whether `model` comes from its own files, so that its weights and tokenizers can be checked."""
    download_bytes: int = 0
    """What the run would download into the hub's cache."""


def find_model(config: RunConfig, folder: Path) -> ModelFindings:
    """Read the configs of the full-size model; from the hub if necessary, which also shows whether it may be read.

    `folder` is not written to.
    """
    findings, path = ModelFindings(), str(config.model.path)
    if path != TINY_MODEL:
        try:
            _, findings.model = open_model(config, folder)
            findings.has_files = True
            revision = findings.model.source.revision
            commit = f", revision {revision[:12]}" if revision is not None else ""
            findings.checks.append(good(GROUP, "model.path", f"{findings.model.title}, {path}{commit}"))
            return findings
        except ModelUnreachableError as error:
            finding = str(error).partition("; ")[0]
            remedy = f"run `hf download {path}` where there is a network, or try again; the trial goes on without it"
            findings.checks.append(warning(GROUP, "model.path", finding, remedy))
        except ModelError as error:
            findings.checks.append(from_error(GROUP, "model.path", error))
    try:
        _, findings.model, origin = describe_model(config.model)
        text = "the tiny model of its family, as configured" if path == TINY_MODEL else f"layers from {origin}"
        findings.checks.append(good(GROUP, "layers", f"{findings.model.title}: {text}"))
    except ModelError:  # reported above: the same files are missing
        findings.checks.append(absent(GROUP, "layers", "not checked: the configs of the model are not on this machine"))
    return findings


def check_weights(findings: ModelFindings, progress: Progress) -> Iterator[CheckResult]:
    """Compare the headers of every weight file with the modules; what is not downloaded yet is one warning."""
    model = findings.model
    if model is None or not findings.has_files:
        return
    components, pending = components_with_weights(model), []
    with progress.phase("reading headers of weight files", items=len(components), noun="components") as phase:
        for component in components:
            try:
                nbytes = _pending_bytes(model, component)
                if nbytes:
                    findings.download_bytes += nbytes
                    pending.append(component)
                else:
                    yield from _weight_results(model, component, unreachable=nbytes is None)
            except ModelError as error:
                yield from_error(GROUP, component, error)
            phase.advance(1)
    if pending:
        text = f"{', '.join(pending)}: not downloaded yet, {bytes_text(findings.download_bytes)}"
        remedy = f"run `hf download {model.source.path}` now; else the run downloads it when it starts"
        yield warning(GROUP, "weights", text, remedy)


def _pending_bytes(model: ModelDescription, component: str) -> int | None:
    """Bytes that must be downloaded for a component; None: the hub cannot be asked."""
    try:
        return 0 if model.source.offline else pending_download_bytes(model.source, (component,))
    except ModelUnreachableError:
        return None


def _weight_results(model: ModelDescription, component: str, *, unreachable: bool) -> Iterator[CheckResult]:
    local = replace(model, source=replace(model.source, offline=True))
    report: WeightFileReport = check_weight_files(local, component)
    if unreachable and not report.files:
        remedy = f"run `hf download {model.source.path}` where there is a network"
        yield warning(GROUP, component, "not in the hub's cache, and the hub cannot be reached", remedy)
        return
    for problem in report.problems:
        yield from_error(GROUP, component, ModelError(problem))
    for remark in report.remarks:
        yield from_error(GROUP, component, ModelError(remark), CheckStatus.WARNING)
    if not report.problems:
        text = f"{report.tensors} tensors in {report.files} file{'s' * (report.files > 1)}, {bytes_text(report.nbytes)}"
        yield good(GROUP, component, f"{text}: names and shapes as in its config")


def check_captions(
    findings: ModelFindings, family: Family, captions: Mapping[str, str], progress: Progress
) -> Iterator[CheckResult]:
    """Load the tokenizers and tokenize every caption; those that the model cuts are one warning."""
    if findings.model is None or not findings.has_files:
        return
    import torch

    source = replace(findings.model.source, without_weights=True, loads_tokenizers=True)
    try:
        tokenizing = replace(findings.model, source=source)
        encoder = family.build_text_encoder(tokenizing, torch.device("cpu"), torch.float32)
    except ModelUnreachableError as error:
        yield from_error(GROUP, "tokenizers", error, CheckStatus.WARNING)
        return
    except ModelError as error:
        yield from_error(GROUP, "tokenizers", error)
        return
    cut = []
    with progress.phase("tokenizing captions", items=len(captions), noun="captions") as phase:
        for caption in captions:
            cut += [caption] if encoder.is_truncated(caption) else []
            phase.advance(1)
    if cut:
        example = cut[0][:CAPTION_CHARACTERS_SHOWN]
        text = f"{len(cut)} of {len(captions)} captions are longer than the model reads, and are cut"
        remedy = "shorten them, or put what matters first"
        yield warning(GROUP, "captions", f"{text}, such as that of {captions[cut[0]]} ({example!r} …)", remedy)
    else:
        yield good(GROUP, "tokenizers", f"{len(captions)} different captions, none is too long")


def download_folder() -> Path:
    """Where the run downloads the model to."""
    return hub.cache_folder()
