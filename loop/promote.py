"""Let a judged model replace the live one, and take it back by one command.

python -m loop.promote NEW --live FOLDER --server http://127.0.0.1:7860

FOLDER is what MODEL_CHECKPOINT names. It becomes a symbolic link to a folder in FOLDER.versions,
where every version that was live is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import getpass
import itertools
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ForeseenError, OneLineParser, UserError, first_line, run_command
from common.files import (
    open_lock,
    remove_unfinished,
    sha256_of,
    swap,
    sync_folder,
    writing_folder,
)
from common.model_folder import (
    MANIFEST_FILE,
    PRECISIONS,
    file_inside,
    is_artefact,
    revision_of,
    verified_manifest,
)
from common.verdicts import NotPromoted, identity_of, refuse_unless_promoted
from loop.running_server import NoAnswer, NotServed, RunningServer

_NO_VERDICT = "has no verdict; compare it with the live model: python -m loop.verdict"


class NotSwitched(ForeseenError):
    """The server does not serve the version that was switched to, so the one before is live."""

    code = "promotion-failed"


class LiveFolder:
    """The link that MODEL_CHECKPOINT names, and the versions beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path.parent.resolve() / path.name
        self.versions = self.path.with_name(f"{path.name}.versions")
        self._journal = self.versions / "journal.jsonl"

    @property
    def current(self) -> str | None:
        """The version that is live; None if FOLDER is something else than a link to one."""
        if not self.path.is_symlink():
            return None
        target = self.path.parent / self.path.readlink()
        return target.name if target.parent == self.versions else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one promotion or roll back at a time.

        Raises:
            UserError: another one runs, or the folder cannot be written.
        """
        try:
            self.versions.mkdir(exist_ok=True)
            file = open_lock(self.versions / ".lock")
        except OSError as error:
            raise UserError(
                f"{self.versions}: cannot be written ({error.strerror}); run this as the user who "
                "owns the model",
                code="not-writable",
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                what = f"{self.path}: another promotion is running; wait until it has ended"
                raise UserError(what, code="folder-in-use") from error
            yield

    def add(self, new: Path, live: list[dict[str, str]] | None) -> str:
        """Copy a model to the versions, whole or not at all; returns the version's name.

        Raises:
            NotPromoted: what was copied is not allowed to go live.
            UserError: the files cannot be copied, or are not those that were exported.
        """
        revision = revision_of(new)
        for number in itertools.count(1):
            name = revision if number == 1 else f"{revision}-{number}"
            target = self.versions / name
            if target.is_dir() and _manifests(target) == _manifests(new) != {}:
                refuse_unjudged(target, live)
                return name
            # The same weights may have been exported in another way before.
            if not os.path.lexists(target):
                break
        remove_unfinished(target)  # what a killed promotion left
        try:
            with writing_folder(target) as aside:
                shutil.copytree(new, aside, dirs_exist_ok=True)
                # The copy, because the original may have changed since it was looked at.
                refuse_unjudged(aside, live, name=new)
        except OSError as error:
            raise UserError(
                f"{new}: cannot be copied to {target} ({first_line(error)})", code="not-writable"
            ) from error
        return name

    def adopt(self) -> str:
        """Make a version of what is live; afterwards FOLDER is a link to it. Returns its name."""
        numbers = itertools.count(2)
        name = revision = revision_of(self.path)
        while (target := self.versions / name).is_dir():
            name = f"{revision}-{next(numbers)}"
        target.unlink(missing_ok=True)  # a link that a killed promotion left
        if self.path.is_symlink():
            # Somebody else's link: its folder stays where it is.
            target.symlink_to(self.path.resolve())
            self.switch(name)
            return name
        # The version's name first leads nowhere. Then it and FOLDER are exchanged in one step, so
        # there is always a model at FOLDER.
        target.symlink_to(Path(self.versions.name, name))
        if not swap(target, self.path):
            target.unlink()
            moved = f"mv {self.path} {target} && ln -s {self.versions.name}/{name} {self.path}"
            raise UserError(
                f"{self.path}: this file system cannot exchange a folder for a link; stop the "
                f"server, and run: {moved}",
                code="not-writable",
            )
        sync_folder(self.versions)
        sync_folder(self.path.parent)
        return name

    def switch(self, name: str) -> None:
        """Let FOLDER lead to another version: readers find the one or the other."""
        aside = self.path.with_name(f".{self.path.name}.next")
        aside.unlink(missing_ok=True)
        aside.symlink_to(Path(self.versions.name, name))
        aside.replace(self.path)
        sync_folder(self.path.parent)

    def note(self, what: str, before: str | None, to: str, verdict: str | None = None) -> None:
        """Add a line to the journal, which is on the disk when this returns."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
        line = {
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "who": f"{user}@{platform.node()}",
            "what": what,
            "from": before,
            "to": to,
            "verdict": verdict,
        }
        with self._journal.open("ab", buffering=0) as file:
            # A full disk or a power failure may have left a part of a line.
            is_cut = file.tell() and not self._journal.read_bytes().endswith(b"\n")
            file.write(b"\n" * bool(is_cut) + json.dumps(line).encode() + b"\n")
            os.fsync(file.fileno())

    def before(self) -> str | None:
        """The version that was live before the current one.

        The link says what is live, and the journal how it came to be: a promotion is noted before
        its switch and a roll back after it, so that after a kill in between, what the journal has
        too much is what the link does not show.
        """
        stack: list[str] = []
        for entry in self._entries():
            if entry["what"] == "promote":
                stack = [*_up_to(stack, entry["from"]), entry["to"]]
            elif entry["what"] == "back":
                stack = _up_to(stack, entry["to"])
        stack = _up_to(stack, self.current)
        return stack[-2] if len(stack) > 1 else None

    def _entries(self) -> Iterator[dict[str, Any]]:
        if not self._journal.is_file():
            return
        for line in self._journal.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and {"what", "from", "to"} <= entry.keys():
                    yield entry


def _up_to(stack: list[str], version: str | None) -> list[str]:
    """What was live until this version was."""
    while stack and stack[-1] != version:
        stack = stack[:-1]
    return stack or ([version] if version else [])


def _artefacts(folder: Path) -> list[Path]:
    """The artefacts of a model: itself, or those inside of its folder."""
    if is_artefact(folder):
        return [folder]
    return [folder / engine for engine in PRECISIONS if is_artefact(folder / engine)]


def _manifests(folder: Path) -> dict[str, str]:
    return {
        str(one.relative_to(folder)): sha256_of(one / MANIFEST_FILE) for one in _artefacts(folder)
    }


def identities_of(live: Path) -> list[dict[str, str]]:
    """Of every artefact that a server may run of this model, with its files verified.

    Raises:
        ModelLoadError: a file is missing or was changed.
    """
    return [identity_of(verified_manifest(one, None)) for one in _artefacts(live)]


def refuse_unjudged(
    new: Path, live: list[dict[str, str]] | None, name: Path | None = None
) -> str | None:
    """Check a candidate's files and its verdict; returns the SHA-256 of that.

    Args:
        live: the identities of what is live; None if nothing is, and no verdict is needed.
        name: what to call it, if it is a copy.

    Raises:
        NotPromoted: the verdict does not let it replace what is live.
        ModelLoadError: a file is missing or was changed.
    """
    found = {one: verified_manifest(one, None) for one in _artefacts(new)}
    for path in new.rglob("*"):
        file_inside(new, str(path.relative_to(new)))
    if live is None:
        return None
    judged = [one for one, manifest in found.items() if manifest.verdict]
    if not judged:
        raise NotPromoted(f"{name or new}: {_NO_VERDICT}")
    # Of the same weights, other artefacts may have none: an export has compared them.
    records = [
        refuse_unless_promoted(one, live, name and name / one.relative_to(new)) for one in judged
    ]
    return str(records[0]["sha256"])


def promote(new: Path, live: LiveFolder, server: RunningServer | None) -> None:
    """Serve a candidate in place of what is live.

    Raises:
        NotPromoted: its verdict does not allow it.
        NotSwitched: the server does not serve it; the one before is live again.
        UserError: nothing was changed.
    """
    is_first = not os.path.lexists(live.path)
    # Once it is live, its verdict is about the one before. A killed promotion is finished so.
    if not is_first and (live.current and _manifests(live.path) == _manifests(new) != {}):
        version = live.current
        print(f"{live.path}: this model is live already, as version {version}")
        if server is not None:
            server.reload(revision_of(live.path))
        return
    parents = None if is_first else identities_of(live.path)
    verdict = refuse_unjudged(new, parents)
    if server is not None and not is_first:
        server.refuse_unless_serving(revision_of(live.path), live.path)
    version = live.add(new, parents)
    before = None if is_first else live.current or live.adopt()
    live.note("promote", before, version, verdict)
    _switch(live, before, version, server)
    print(f"promoted: {live.path} is version {version} now, before it was {before or 'nothing'}")


def _switch(
    live: LiveFolder, before: str | None, version: str, server: RunningServer | None
) -> None:
    live.switch(version)
    if server is None:
        return
    try:
        server.reload(revision_of(live.path))
    except (NotServed, NoAnswer) as error:
        if before is None:
            raise NotSwitched(f"{error}; there is no version before, so {version} stays") from error
        live.switch(before)
        live.note("undo", version, before)
        raise NotSwitched(f"{error}; version {before} is live as before") from error


def roll_back(live: LiveFolder, server: RunningServer | None) -> None:
    """Serve the version before again; a server that does not answer takes it when it starts.

    Raises:
        UserError: there is none, or its files were changed.
        NotSwitched: the server does not serve it.
    """
    current, before = live.current, live.before()
    if current is None or before is None:
        what = f"{live.path}: no version was live before this one"
        raise UserError(what, code="no-version-before")
    target = live.versions / before
    if not target.is_dir():
        raise UserError(
            f"{target}: the version before is no longer there; promote another one",
            code="no-version-before",
        )
    identities_of(target)
    is_up = server is not None and server.answers
    _switch(live, current, before, server if is_up else None)
    live.note("back", current, before)
    print(f"rolled back: {live.path} is version {before} again, before it was {current}")
    if server is not None and not is_up:
        print(f"{server.address} does not answer; it serves this version when it starts")


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    live = LiveFolder(options.live)
    if options.live.is_file():
        what = f"--live {options.live}: is a file; name a model folder or an artefact"
        raise UserError(what, code="usage")
    if options.check:
        is_first = not os.path.lexists(options.live)
        same = not is_first and _manifests(options.live) == _manifests(options.new) != {}
        if not same:
            refuse_unjudged(options.new, None if is_first else identities_of(options.live))
        print(f"{options.new}: may replace {options.live}")
        return
    server = None
    if options.server:
        server = RunningServer(options.server, os.environ.get("API_KEY", ""), options.pid)
    with live.locked():
        if options.back:
            roll_back(live, server)
        else:
            promote(options.new, live, server)
    if server is None:
        print("give --server, reload the server (kill -HUP PID), or start it to serve this version")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m loop.promote",
        description=__doc__,
        epilog="Exit codes: 0 done, 1 the server does not serve it and the version before is live, "
        "2 nothing was changed, 10 its verdict is HOLD, 11 no verdict lets it go live. "
        "The key for the reload comes from API_KEY.",
    )
    add = parser.add_argument
    add("new", nargs="?", type=Path, metavar="NEW", help="the candidate, with its verdict")
    add("--live", type=Path, required=True, metavar="FOLDER", help="what MODEL_CHECKPOINT names")
    add("--server", metavar="URL", help="the running server, which is asked to reload")
    add("--pid", type=int, help="reload by SIGHUP to this process instead of a request with a key")
    add("--back", action="store_true", help="roll back to the version before")
    add("--check", action="store_true", help="only say whether NEW may go live")
    options = parser.parse_args(arguments)
    if (options.new is None) != options.back or (options.back and options.check):
        parser.error("give NEW to promote it, or --back to roll back")
    if options.pid is not None and not options.server:
        parser.error("--pid needs --server, which says whether the reload has succeeded")
    if options.new is not None and not options.new.is_dir():
        parser.error(f"{options.new}: no such folder")
    return options


if __name__ == "__main__":
    run_command(main)
