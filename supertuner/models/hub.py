"""Downloads files of a model from the Hugging Face hub into its cache, and explains every failure.

The messages never quote a server or a library: a URL in their text may contain credentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import errors, snapshot_download

from supertuner.core.errors import ModelError
from supertuner.models.spec import ModelSource


def download_snapshot(source: ModelSource, patterns: Sequence[str]) -> Path:
    """The folder of this revision in the hub's cache, named by its commit, with every file that matches a pattern.

    Raises ModelError with the cause and the remedy.
    """
    try:
        folder = snapshot_download(
            source.path,
            revision=source.revision,
            allow_patterns=list(patterns),
            local_files_only=source.offline,
            library_name="supertuner",
        )
    except errors.HFValidationError as error:
        raise ModelError(
            f"model.path is {source.path!r}: there is no such folder, and a repository on the hub is named owner/name"
        ) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # the base of all its transport errors
        raise ModelError(_failure_message(source, error)) from error
    return Path(folder)


def _failure_message(source: ModelSource, error: BaseException) -> str:
    name = source.path
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its licence on the hub, then set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"model.path is {name!r}: there is no such folder, and no such model on the hub; "
            "if it is private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"model.revision is {source.revision!r}: {name} has no such branch, tag or commit"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _missing_files_message(source, error)
    return _unreachable_message(name, error)


def _missing_files_message(source: ModelSource, error: errors.LocalEntryNotFoundError) -> str:
    """The message if files are missing in the cache. The error's cause tells whether and how a download failed."""
    incomplete = f"{source.path} (revision {source.revision or 'main'}) is not complete in the hub's cache"
    if source.offline:
        return f"{incomplete}, and model.offline is true; set it to false once to download it"
    if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return f"{incomplete}, and HF_HUB_OFFLINE is set; unset it once to download it"
    return _unreachable_message(source.path, error.__cause__ or error)


def _unreachable_message(name: str, error: BaseException) -> str:
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return f"the hub rejects the token in HF_TOKEN for {name}; correct it, or unset it"
        return f"the hub answered a request for {name} with status {status}; try again later, or use a local folder"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{name} could not be downloaded into the hub's cache: {error.strerror}"
    return (
        f"model.path is {name!r}: there is no such folder, and the hub cannot be reached "
        f"({type(error).__name__}); check the network, or download the model elsewhere and set model.path to its folder"
    )
