"""Uploads to the hub, against a local server that speaks its protocol: what arrives, and what each failure says."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from supertuner.core.errors import HubError, HubUnreachableError
from supertuner.models import hub_upload
from tests.models.push_server import TOKEN, FakeRepository, PushHub, serve_push_hub, use_push_hub

NAME = "someone/lora"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushHub]:
    with serve_push_hub() as hub:
        use_push_hub(hub, monkeypatch)
        yield hub


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path | bytes]:
    (tmp_path / "a.safetensors").write_bytes(b"weights" * 1000)
    return {"a.safetensors": tmp_path / "a.safetensors", "README.md": b"---\nlicense: mit\n---\n"}


def push(files: dict[str, Path | bytes]) -> bool:
    return hub_upload.commit_files(hub_upload.open_repository(NAME, private=True), files, "a message")


def error_text(error: BaseException) -> str:
    """The message, after a check that neither it nor what Python prints of the error has the token."""
    printed = "".join(traceback.format_exception(error))
    assert TOKEN not in printed and TOKEN not in str(error)
    return str(error)


def test_files_arrive_in_one_commit_and_the_same_files_make_no_other(hub: PushHub, files: dict[str, Path | bytes]):
    assert push(files) is True
    repository = hub.repositories[NAME]
    assert repository.private and repository.files == {
        "a.safetensors": b"weights" * 1000,
        "README.md": files["README.md"],
    }
    assert repository.messages == ["a message"] and len(hub.uploads()) == 1
    assert push(files) is False
    assert len(hub.uploads()) == 1 and len(repository.commits) == 2
    assert push({**files, "README.md": b"---\nlicense: other\n---\n"}) is True
    assert len(hub.uploads()) == 1, "an unchanged large file is not sent again"


def test_an_existing_repository_keeps_its_visibility_and_needs_no_permission_to_create(hub: PushHub) -> None:
    hub.repositories[NAME] = FakeRepository(private=False)
    hub.faults["create"] = [403]
    opened = hub_upload.open_repository(NAME, private=True)
    assert not opened.is_private and opened.url == f"{hub.address}/{NAME}"
    assert hub_upload.read_text(opened, "README.md") is None
    hub.repositories[NAME].files["README.md"] = "größer".encode()
    assert hub_upload.read_text(opened, "README.md") == "größer"


def test_the_account_is_that_of_the_token(hub: PushHub) -> None:
    account = hub_upload.read_account()
    assert (account.name, account.organizations) == ("someone", {"a-group"})
    assert account.problem_with("Someone/x") is None and account.problem_with("a-group/x") is None
    assert "neither nobody nor a member" in str(account.problem_with("nobody/x"))
    hub.account["auth"]["accessToken"]["role"] = "read"
    assert "may only read; run `hf auth login`" in str(hub_upload.read_account().problem_with(NAME))
    hub.account["auth"]["accessToken"]["role"] = "fineGrained"  # its organizations need not be listed
    assert hub_upload.read_account().problem_with("nobody/x") is None


@pytest.mark.parametrize(
    ("step", "status", "kind", "message"),
    [
        ("info", 401, HubError, "rejects the token; run `hf auth login`, or set HF_TOKEN"),
        ("info", 403, HubError, "does not allow the token to write to someone/lora"),  # gated
        ("create", 401, HubError, "rejects the token"),
        ("create", 403, HubError, "does not allow the token to write to someone/lora"),
        ("create", 404, HubError, "has no someone/lora that this token can see"),
        ("create", 500, HubUnreachableError, "answered with status 500 for someone/lora; try again later"),
        ("preupload", 403, HubError, "does not allow the token to write"),
        ("batch", 413, HubError, "the storage of the owner of someone/lora"),
        ("storage", 403, HubError, "does not allow the token to write"),
        ("yaml", 400, HubError, "refuses the metadata of the model card of someone/lora; correct exports.license"),
        ("commit", 403, HubError, "does not allow the token to write"),
        ("commit", 412, HubError, "was changed on the Hugging Face hub during the push; push again"),
        ("commit", 418, HubError, "with status 418"),
        ("commit", 500, HubUnreachableError, "answered with status 500"),
    ],
)
def test_a_refusal_names_cause_and_remedy_and_never_the_token(
    hub: PushHub,
    files: dict[str, Path | bytes],
    capfd: pytest.CaptureFixture[str],
    step: str,
    status: int,
    kind: type[HubError],
    message: str,
) -> None:
    hub.faults[step] = [status] * (2 if step == "info" else 1)
    if step == "info":
        hub.repositories[NAME] = FakeRepository(private=True)
        hub.faults["create"] = [status]
    with pytest.raises(kind) as caught:
        push(files)
    assert message in error_text(caught.value)
    assert TOKEN not in "".join(capfd.readouterr())
    assert NAME not in hub.repositories or not hub.repositories[NAME].messages


def test_a_server_that_fails_once_is_asked_again_without_a_word(
    hub: PushHub, files: dict[str, Path | bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    hub.faults["preupload"] = [503]
    assert push(files) is True
    assert "".join(capfd.readouterr()) == ""


def test_somebody_elses_commit_during_the_push_is_not_overwritten(hub: PushHub, files: dict[str, Path | bytes]) -> None:
    opened = hub_upload.open_repository(NAME, private=True)
    hub.repositories[NAME].commits.append("0" * 40)
    with pytest.raises(HubError, match="was changed on the Hugging Face hub"):
        hub_upload.commit_files(opened, files, "a message")


def test_without_a_token_nothing_is_asked(hub: PushHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for call in (hub_upload.read_account, lambda: hub_upload.open_repository(NAME, private=True)):
        with pytest.raises(HubError, match="there is no token of the Hugging Face hub; run `hf auth login`"):
            call()
    assert not [line for line in hub.requests if "whoami" in line or "create" in line]


def test_a_slow_hub_and_no_hub_are_reported_in_time(hub: PushHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults["whoami"], hub.faults["create"] = [0], [0]
    for call in (
        lambda: hub_upload.read_account(timeout_s=0.2),
        lambda: hub_upload.open_repository(NAME, private=True, timeout_s=0.2),
    ):
        with pytest.raises(HubUnreachableError, match=r"cannot be reached \(ReadTimeout\)"):
            call()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError, match=r"cannot be reached \(ConnectError\); check the network"):
        hub_upload.read_account()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE is set"):
        hub_upload.read_account()


def test_a_login_page_instead_of_the_hub_is_named(hub: PushHub) -> None:
    hub.account = ["a page"]  # type: ignore[assignment]
    with pytest.raises(HubUnreachableError, match=r"cannot be understood .*check HF_ENDPOINT and the network"):
        hub_upload.read_account()


def test_a_name_that_the_hub_cannot_have_is_refused(hub: PushHub) -> None:
    with pytest.raises(HubError, match=r"'someone/x.git' is not the name of a repository"):
        hub_upload.open_repository("someone/x.git", private=True)
