"""Downloads files of a model from the Hugging Face hub into its cache, and explains every failure.

The messages never quote a server or a library: a URL in their text may contain credentials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download

from supertuner.core.errors import ModelError, ModelUnreachableError
from supertuner.models.spec import ModelSource


def download_snapshot(source: ModelSource, patterns: Sequence[str]) -> Path:
    """The folder of this revision in the hub's cache, named by its commit, with every file that matches a pattern.

    Raises ModelError with the cause and the remedy.
    """
    with _explained_failures(source):
        folder = snapshot_download(
            source.path,
            revision=source.revision,
            allow_patterns=list(patterns),
            local_files_only=source.offline,
            library_name="supertuner",
        )
    return Path(folder)


def pending_bytes(source: ModelSource, patterns: Sequence[str]) -> int:
    """Bytes of the matching files that a download would fetch. Asks the hub for each file, and downloads nothing.

    Errors as in `download_snapshot`: a gated repository is refused here, too.
    """
    with _explained_failures(source):
        files = snapshot_download(
            source.path,
            revision=source.revision,
            allow_patterns=list(patterns),
            dry_run=True,
            library_name="supertuner",
        )
    return sum(file.file_size or 0 for file in files if file.will_download)


def cache_folder() -> Path:
    """The hub's cache on this machine."""
    return Path(constants.HF_HUB_CACHE)


@contextmanager
def _explained_failures(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except errors.HFValidationError as error:
        raise ModelError(
            f"model.path is {source.path!r}: there is no such folder, and a repository on the hub is named owner/name"
        ) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # the base of all its transport errors
        raise _failure(source, error) from error


def _failure(source: ModelSource, error: BaseException) -> ModelError:
    name = source.path
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{name} is gated: accept its licence on the hub, then set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"model.path is {name!r}: there is no such folder, and no such model on the hub; "
            "if it is private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"model.revision is {source.revision!r}: {name} has no such branch, tag or commit")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _missing_files(source, error)
    if isinstance(error, errors.DryRunError) and error.__cause__ is not None:
        return _failure(source, error.__cause__)
    return _transport_failure(name, error)


def _missing_files(source: ModelSource, error: errors.LocalEntryNotFoundError) -> ModelError:
    """The error if files are missing in the cache. Its cause tells whether and how a download failed."""
    incomplete = f"{source.path} (revision {source.revision or 'main'}) is not complete in the hub's cache"
    if source.offline:
        return ModelError(f"{incomplete}, and model.offline is true; set it to false once to download it")
    if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return ModelError(f"{incomplete}, and HF_HUB_OFFLINE is set; unset it once to download it")
    return _transport_failure(source.path, error.__cause__ or error)


def _transport_failure(name: str, error: BaseException) -> ModelError:
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return ModelError(f"the hub rejects the token in HF_TOKEN for {name}; correct it, or unset it")
        problem = f"the hub answered a request for {name} with status {status}"
        return ModelUnreachableError(f"{problem}; try again later, or use a local folder")
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return ModelError(f"{name} could not be downloaded into the hub's cache: {error.strerror}")
    return ModelUnreachableError(
        f"model.path is {name!r}: there is no such folder, and the hub cannot be reached "
        f"({type(error).__name__}); check the network, or download the model elsewhere and set model.path to its folder"
    )
