"""Uploads files to a repository on the Hugging Face hub as one commit, and explains every failure.

The token comes from `hf auth login` or HF_TOKEN, through huggingface_hub, and is sent in the header of requests only.
No message quotes a server or the library, and no error has theirs as its cause: a server's answer may repeat the token.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Final

from huggingface_hub import CommitOperationAdd, HfApi, errors, get_token, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, and not listed for type checkers
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    logging,
)

from supertuner import __version__
from supertuner.core.errors import HubError, HubUnreachableError

LOG_IN: Final = "run `hf auth login`, or set HF_TOKEN to a token that may write"
ANSWER_TIMEOUT_S: Final = 15.0
"""For requests whose answer is small."""
STALL_TIMEOUT_S: Final = 120.0
"""For an upload: seconds without any progress."""
CARD_FILE: Final = "README.md"
MALFORMED_ANSWER: Final = (ValueError, KeyError, TypeError, AttributeError)
"""What the library raises if an answer is not what it expects, for example the login page of a network."""


@dataclass(frozen=True, slots=True)
class HubAccount:
    """The account that the token belongs to."""

    name: str
    organizations: frozenset[str]
    token_role: str | None
    """"read", "write" or "fineGrained"; None: the hub did not say."""

    def problem_with(self, repository: str) -> str | None:
        """Why this account certainly cannot write to the repository; None if it may be able to."""
        owner = repository.partition("/")[0]
        if self.token_role == "read":
            return f"the token of {self.name} on the Hugging Face hub may only read; {LOG_IN}"
        if self.token_role == "write" and owner.lower() not in {self.name.lower(), *map(str.lower, self.organizations)}:
            known = " or ".join((self.name, *sorted(self.organizations)))
            return f"{self.name} is neither {owner} nor a member of it; name a repository of {known}"
        return None


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository as it is on the hub now."""

    name: str
    url: str
    is_private: bool
    commit: str


def read_account(timeout_s: float = ANSWER_TIMEOUT_S) -> HubAccount:
    """The account of the token. HubError if there is no valid token; HubUnreachableError if the hub does not answer."""
    with _explain_errors("the account of the token", timeout_s):
        # Not HfApi.whoami, which waits for the answer without end.
        response = get_session().get(f"{_api().endpoint}/api/whoami-v2", headers=_headers())
        hf_raise_for_status(response)
        answer = response.json()
        role = answer.get("auth", {}).get("accessToken", {}).get("role")
        return HubAccount(answer["name"], frozenset(row["name"] for row in answer.get("orgs", ())), role)


def open_repository(name: str, *, private: bool, timeout_s: float = STALL_TIMEOUT_S) -> HubRepository:
    """The repository, created now if it does not exist; `private` counts only then."""
    with _explain_errors(name, timeout_s):
        api = _api()
        try:
            info = api.repo_info(name)
        except errors.RepositoryNotFoundError:  # not create_repo at once: a token may be for one repository only
            api.create_repo(name, private=private, exist_ok=True)
            info = api.repo_info(name)
        return HubRepository(name, f"{api.endpoint}/{name}", bool(info.private), str(info.sha))


def read_text(repository: HubRepository, file: str) -> str | None:
    """The content of a small text file of the repository; None if there is none."""
    with _explain_errors(repository.name, ANSWER_TIMEOUT_S):
        url = hf_hub_url(repository.name, file, revision=repository.commit, endpoint=_api().endpoint)
        response = get_session().get(url, headers=_headers())
        if response.status_code == 404:
            return None
        hf_raise_for_status(response)
        return response.content.decode(errors="replace")


def commit_files(
    repository: HubRepository, files: Mapping[str, Path | bytes], message: str, timeout_s: float = STALL_TIMEOUT_S
) -> bool:
    """Upload files, by their names in the repository, as one commit. Returns whether there is a new commit: if all of
    them are there already, there is none. HubError if another client changed the repository since it was opened."""
    with _explain_errors(repository.name, timeout_s):
        done = _api().create_commit(
            repository.name,
            [CommitOperationAdd(name, content) for name, content in files.items()],
            commit_message=message,
            parent_commit=repository.commit,
        )
        return done.oid != repository.commit


def _api() -> HfApi:
    """The library's client, which sends the token. HubError if there is none."""
    if get_token() is None:
        raise HubError(f"there is no token of the Hugging Face hub; {LOG_IN}")
    return HfApi(token=True, library_name="supertuner", library_version=__version__)


def _headers() -> dict[str, str]:
    return build_hf_headers(token=True, library_name="supertuner", library_version=__version__)


@contextmanager
def _explain_errors(subject: str, timeout_s: float) -> Iterator[None]:
    """Turn every failure into HubError, and let requests fail that make no progress for `timeout_s` seconds.

    Warnings of the library and of the server are not shown: they may contain signed addresses, or repeat the token.
    """
    verbosity, session, had_bars = logging.get_verbosity(), get_session(), not are_progress_bars_disabled()
    limit = getattr(session, "timeout", None)  # versions before 1.0 have no limit to set
    if had_bars and not sys.stderr.isatty():
        disable_progress_bars()
    logging.set_verbosity(ERROR)
    session.timeout = timeout_s
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (errors.HTTPError, OSError, RuntimeError, *MALFORMED_ANSWER) as error:  # type: ignore[attr-defined]
        raise _hub_error(subject, error) from None
    finally:
        session.timeout = limit
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


def _hub_error(subject: str, error: BaseException) -> HubError:
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # of the upload of one file
        error = error.__cause__
    if isinstance(error, errors.HfHubHTTPError):
        return _status_error(subject, error.response.status_code)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubUnreachableError("HF_HUB_OFFLINE is set, so the Hugging Face hub is not contacted; unset it to push")
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{subject!r} is not the name of a repository on the Hugging Face hub; write OWNER/NAME")
    if isinstance(error, ValueError) and str(error).startswith("Invalid metadata"):
        return HubError(f"the hub refuses the metadata of the model card of {subject}; correct exports.license")
    if isinstance(error, MALFORMED_ANSWER):
        return HubUnreachableError(
            f"the answer of the Hugging Face hub about {subject} cannot be understood ({type(error).__name__}); check "
            "HF_ENDPOINT and the network"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return HubError(f"{error.filename} cannot be read: {error.strerror}")
    if isinstance(error, PermissionError):  # of the storage of large files
        return _status_error(subject, 401)
    return HubUnreachableError(
        f"the Hugging Face hub cannot be reached ({type(error).__name__}); check the network, or try again later"
    )


def _status_error(subject: str, status: int) -> HubError:
    match status:
        case 401:
            return HubError(f"the Hugging Face hub rejects the token; {LOG_IN}")
        case 403:
            return HubError(
                f"the Hugging Face hub does not allow the token to write to {subject}: its owner is another one, the "
                "token lacks the permission, or the storage of the owner is full; use a token that may write, or "
                "another repository"
            )
        case 402 | 413 | 507:
            return HubError(f"the storage of the owner of {subject} on the Hugging Face hub does not allow these files")
        case 404:
            return HubError(f"the Hugging Face hub has no {subject} that this token can see; check its name")
        case 409 | 412:
            return HubError(f"{subject} was changed on the Hugging Face hub during the push; push again")
        case 408 | 429 | 500 | 502 | 503 | 504:
            return HubUnreachableError(
                f"the Hugging Face hub answered with status {status} for {subject}; try again later"
            )
        case _:
            return HubError(
                f"the Hugging Face hub refused {subject} with status {status}; check the name and the token"
            )
