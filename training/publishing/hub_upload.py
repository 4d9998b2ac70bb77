"""Uploads files to a Hugging Face Hub repository in one commit, and explains failures in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo, SpaceInfo
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from common.credentials import header_token
from common.errors import ForeseenError, OneLineParser, UserError
from common.files import writing_folder
from common.text import counted
from training.publishing.model_card import TAG

TOKENS_PAGE = "https://huggingface.co/settings/tokens"
EXAMPLES_IN = ("metrics.json", "model/model.json")
# The files that the hub creates in a new repository.
_OF_A_NEW_REPOSITORY = {".gitattributes", "README.md"}
_REASONS = {
    401: f"the hub does not accept the token; make one with write access at {TOKENS_PAGE}, then set HF_TOKEN",
    402: "the hub asks for a paid plan or more storage, see https://huggingface.co/pricing",
    403: f"the token has no right to write there; give it write access at {TOKENS_PAGE}, or choose another name",
    404: "the hub has no such repository, or hides it from this token",
    409: "it was changed meanwhile; start again",
    412: "it was changed meanwhile; start again",
    429: "the hub got too many requests; wait a few minutes and start again",
}
# What the hub's client raises when the hub refuses or cannot be reached.
HUB_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)

# What is uploaded, by its path in the repository: a file here, or the bytes themselves.
Files = Mapping[str, Path | bytes]


class PublishFailure(ForeseenError):
    """The upload succeeded, but the repository or the Space is not in the expected state."""


@dataclass(frozen=True)
class Target:
    """A repository to upload to; ``name`` is ``account/name``. An existing one is never made public
    or private.

    ``sdk``: what the hub does with a Space's files.
    """

    name: str
    kind: Literal["model", "space"]
    private: bool
    sdk: Literal["docker", "static"] = "docker"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def publishing_parser(prog: str, description: str, dry_run_folder: Path) -> OneLineParser:
    """Return a parser with what every publishing command takes: ``--private`` and ``--dry-run [FOLDER]``."""
    parser = OneLineParser(prog=prog, description=description)
    parser.add_argument(
        "--private",
        action="store_true",
        help="only people with one of your tokens can see and use it",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        const=dry_run_folder,
        help=(
            f"write the repository into this folder instead (default: {dry_run_folder}); needs no "
            "token"
        ),
    )
    return parser


def sign_in() -> tuple[HfApi, str]:
    """The hub's client, with the token of HF_TOKEN or of the hub's login, and the account's name.

    Raises:
        UserError: there is no token, it is not valid, or the hub cannot be reached.
    """
    if not sys.stderr.isatty():  # a bar that nobody watches fills the log
        disable_progress_bars()
    token = header_token("HF_TOKEN", get_token())
    if token is None:
        raise UserError(
            f"no token for the hub; set HF_TOKEN or run hf auth login (tokens: {TOKENS_PAGE})",
            code="hub-token",
        )
    api = HfApi(token=token)
    with hub_errors(f"signing in to {api.endpoint}"):
        return api, api.whoami()["name"]


def full_name(name: str, account: str) -> str:
    """``account/name`` for a name that may lack the account."""
    full = name if "/" in name else f"{account}/{name}"
    with hub_errors(f"name {name!r}"):
        validate_repo_id(full)
    return full


def show(files: Files) -> None:
    sizes = {name: _size(source) for name, source in sorted(files.items())}
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
    print(f"{sum(sizes.values()):>12,}  bytes in {len(files)} files")
    if count := _num_examples(files):
        print(
            f"Everyone who can open it sees {counted(count, 'example text')}. Training takes one test "
            "text per label; to publish none, train with --examples false."
        )


def _num_examples(files: Files) -> int:
    """Texts that the model, or a page that runs it, offers as examples."""
    found = []
    for name, source in files.items():
        if name.endswith(EXAMPLES_IN):
            content = source if isinstance(source, bytes) else source.read_bytes()
            examples = json.loads(content).get("examples")
            found.append(len(examples) if isinstance(examples, dict) else 0)
    return max(found, default=0)


def write_files(files: Files, folder: Path, *, replaces: bool = False) -> None:
    """Write the files into a new or empty folder, as in the repository.

    ``replaces``: it may hold what an earlier dry run wrote.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    # A folder that is not empty is only replaced if it has our card: whoever mistypes the name of
    # another one loses nothing.
    if (
        folder.exists()
        and (not folder.is_dir() or any(folder.iterdir()))
        and not (replaces and _is_laid_out(folder))
    ):
        raise UserError(
            f"{folder}: is not empty; name a new or empty folder", code="output-not-empty"
        )
    try:
        with writing_folder(folder) as aside:
            for name, source in files.items():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(source, Path):
                    shutil.copyfile(source, target)
                else:
                    target.write_bytes(source)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror})", code="not-writable"
        ) from error


def upload(
    api: HfApi,
    target: Target,
    files: Files,
    owned: Collection[str],
    reasons: Mapping[int, str] | None = None,
) -> str:
    """Create the repository if needed, commit these files to it at once, and read them back.
    Returns the commit.

    The hub keeps what a broken upload has sent, so it is not sent again. ``owned``: the folders and
    files at the root that uploads write. What is there of an earlier one and not in ``files`` is
    deleted; other files stay. ``reasons``: what some of the hub's status codes mean here.

    Raises:
        UserError: the hub refuses, something else is kept there, or the connection breaks.
        PublishFailure: the hub holds other bytes than were sent.
    """
    with hub_errors(str(target), reasons):
        there = _open(api, target)
        _refuse_foreign(target, there)
        additions = [CommitOperationAdd(name, source) for name, source in sorted(files.items())]
        names = {file.rfilename for file in there.siblings or []} - files.keys()
        stale = sorted(name for name in names if name.partition("/")[0] in owned)
        operations = [*additions, *(CommitOperationDelete(name) for name in stale)]
        message = f"Publish {target.name.rpartition('/')[2]}"
        # On top of what was looked at: without the parent, two publishers would delete each other's
        # files unseen.
        commit = api.create_commit(
            target.name,
            operations,
            commit_message=message,
            repo_type=target.kind,
            parent_commit=there.sha,
        ).oid
        _verify(api, target, additions, commit)
    return commit


def _is_laid_out(folder: Path) -> bool:
    card = folder / "README.md"
    return card.is_file() and TAG in card.read_text("utf-8")


@contextmanager
def hub_errors(what: str, reasons: Mapping[int, str] | None = None) -> Iterator[None]:
    """Turn connection errors and refusals into one line: ``what``, the reason, and what to do."""
    try:
        yield
    except HUB_ERRORS as error:
        raise UserError(f"{what}: {explain(error, reasons)}", code="hub-upload-failed") from error


def explain(
    error: BaseException,
    reasons: Mapping[int, str] | None = None,
    after_a_break: str = "start again: what the hub already has is not sent again",
) -> str:
    """The reason behind one of ``HUB_ERRORS`` and what to do, in one line that does not show the
    token.

    ``reasons``: what some of the hub's status codes mean here. ``after_a_break``: what to do if the
    connection broke.
    """
    # Whatever the error quotes, this line goes into logs. Without a token a zero byte stands in its
    # place, which no line has: an empty one would be found between all letters.
    return _explain(error, _REASONS | dict(reasons or {}), after_a_break).replace(
        get_token() or "\0", "TOKEN"
    )


def _explain(error: BaseException, reasons: Mapping[int, str], after_a_break: str) -> str:
    # The client wraps errors, and so do the libraries below it. A refusal may be anywhere in the
    # chain, and the innermost error says what happened to a connection.
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    answers = [
        cause
        for cause in causes
        if isinstance(cause, HfHubHTTPError) and cause.response is not None
    ]
    detail = " ".join(str(causes[-1]).split())[:200] or type(causes[-1]).__name__
    if answers:
        status = answers[0].response.status_code
        says = f" (the hub says: {answers[0].server_message})" if answers[0].server_message else ""
        return reasons.get(status, f"the hub answers {status}; start again later") + says
    if any(isinstance(cause, HTTPError | OSError) for cause in causes) or isinstance(
        error, RuntimeError
    ):
        return f"the connection failed ({detail}); {after_a_break}"
    return detail


def _open(api: HfApi, target: Target) -> ModelInfo | SpaceInfo:
    try:
        return api.repo_info(target.name, repo_type=target.kind)
    except RepositoryNotFoundError:
        # None instead of False leaves it to the account, which may keep all of its repositories
        # private. Then it is read again, because the upload is put on top of the first commit.
        sdk = {"space_sdk": target.sdk} if target.kind == "space" else {}
        api.create_repo(target.name, repo_type=target.kind, private=target.private or None, **sdk)
        return api.repo_info(target.name, repo_type=target.kind)


def _refuse_foreign(target: Target, there: ModelInfo | SpaceInfo) -> None:
    if target.private and not there.private:
        raise UserError(
            f"{target}: exists and is public; make it private in its settings, or choose another "
            "name",
            code="hub-name-taken",
        )
    # The tag in the card is the proof that a repository was uploaded from here. One that the hub
    # has just created has no tag yet, and only the hub's own files.
    names = {file.rfilename for file in there.siblings or []}
    tags = (there.card_data.get("tags") if there.card_data else None) or []
    if names - _OF_A_NEW_REPOSITORY and TAG not in tags:
        raise UserError(
            f"{target}: holds something else (its card has no tag {TAG}); choose another name",
            code="hub-name-taken",
        )
    if isinstance(there, SpaceInfo) and there.sdk not in (None, target.sdk):
        raise UserError(
            f"{target}: is a Space that runs {there.sdk}, not {target.sdk}; choose another name",
            code="hub-name-taken",
        )


def _verify(api: HfApi, target: Target, additions: list[CommitOperationAdd], commit: str) -> None:
    # Of this commit and not of the branch, which another commit may have moved on meanwhile.
    tree = api.list_repo_tree(target.name, recursive=True, revision=commit, repo_type=target.kind)
    there = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    for addition in additions:
        found = there.get(addition.path_in_repo)
        if found is None or not _holds(found, addition):
            raise PublishFailure(
                f"{target}: {addition.path_in_repo} was not stored as it was sent; rerun the "
                "command",
                code="hub-upload-failed",
            )


def _holds(found: RepoFile, sent: CommitOperationAdd) -> bool:
    # The hub names large files by the SHA-256 of their content, and others as git does: by the
    # SHA-1 of a header with the length, a zero byte and the content. So nothing has to be
    # downloaded.
    if found.lfs is not None:
        return found.lfs.sha256 == sent.upload_info.sha256.hex()
    with sent.as_file() as file:
        content = file.read()
    return found.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def content_of(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()
