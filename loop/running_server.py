"""A running server that is asked to reload its model, and what it says of it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from common.errors import ForeseenError, UserError, first_line

# A large model may take minutes, and several workers load it one after another.
_RELOAD_S = 300.0
_ANSWER_S = 10.0
_SETTLE_S = 20.0
_PAUSE_S = 0.1
_RELOADS = re.compile(
    r'^distrinews_model_reloads_total\{(?:[^}]*,)?result="(\w+)"[^}]*\} (\S+)', re.MULTILINE
)


class NotServed(ForeseenError):
    """The server answers, but does not serve the model that it was asked to."""

    code = "promotion-failed"


class NoAnswer(ForeseenError):
    """The server does not answer."""

    code = "promotion-failed"


class RunningServer:
    """Asks a server over HTTP; ``pid`` if it is to be reloaded by a signal."""

    def __init__(self, address: str, key: str, pid: int | None = None) -> None:
        if not address.startswith(("http://", "https://")):
            raise UserError(
                f"--server {address}: must begin with http:// or https://", code="usage"
            )
        self.address = address.rstrip("/")
        self._key = key
        self._pid = pid

    def _ask(self, path: str, *, post: bool = False, seconds: float = _ANSWER_S) -> bytes:
        request = Request(self.address + path, b"" if post else None)
        if post and self._key:
            # Unredirected: the key is for no other host.
            request.add_unredirected_header("X-API-Key", self._key)
        try:
            with urlopen(request, timeout=seconds) as response:
                return response.read()
        except HTTPError:
            raise
        except OSError as error:
            what = first_line(getattr(error, "reason", None) or error)
            raise NoAnswer(f"{self.address}: no answer ({what})") from error

    @property
    def answers(self) -> bool:
        """Whether it answers at all, whatever it serves."""
        try:
            self._ask("/livez")
        except HTTPError:
            return True
        except NoAnswer:
            return False
        return True

    def revision(self) -> str | None:
        """What it serves; None if it has no model."""
        try:
            found: Any = json.loads(self._ask("/model"))["revision"]
        except (HTTPError, ValueError, LookupError, TypeError):
            return None
        return str(found)

    def refuse_unless_serving(self, revision: str, live: Path) -> None:
        """Raises:
        UserError: it serves another model than that in the live folder, or does not answer.
        """
        try:
            served = self.revision()
        except NoAnswer as error:
            what = f"{error}; start it, or leave out --server"
            raise UserError(what, code="promotion-failed") from error
        if served != revision:
            raise UserError(
                f"{self.address}: serves revision {served or 'of no model'}, and {live} is "
                f"{revision}; reload it first, or name the server whose MODEL_CHECKPOINT is {live}",
                code="promotion-failed",
            )

    def reload(self, revision: str) -> None:
        """Have it load what MODEL_CHECKPOINT names now, and wait until it serves this revision.

        Raises:
            NotServed: it refuses the model, or serves another one.
            NoAnswer: it does not answer.
        """
        if self._pid is None:
            self._reload_by_request()
        else:
            self._reload_by_signal(self._pid)
        # With several workers an old one may answer for a moment.
        until = time.monotonic() + _SETTLE_S
        while (served := self.revision()) != revision:
            if time.monotonic() > until:
                raise NotServed(
                    f"{self.address}: serves revision {served} after the reload and not "
                    f"{revision}; does its MODEL_CHECKPOINT name this folder?"
                )
            time.sleep(_PAUSE_S)

    def _reload_by_request(self) -> None:
        until = time.monotonic() + _RELOAD_S
        while True:
            try:
                self._ask("/admin/reload", post=True, seconds=_RELOAD_S)
                return
            except HTTPError as error:
                # Another reload may have begun before the switch, so this one still has to run.
                if error.code == 409 and time.monotonic() < until:
                    time.sleep(_PAUSE_S)
                    continue
                raise NotServed(f"{self.address}: {_reason(error)}") from error

    def _reload_by_signal(self, pid: int) -> None:
        before = self._reloads()
        try:
            os.kill(pid, signal.SIGHUP)
        except OSError as error:
            raise NotServed(f"--pid {pid}: cannot be sent SIGHUP ({error.strerror})") from error
        until = time.monotonic() + _RELOAD_S
        # It answers no signal, but counts what it loads and what it refuses.
        while (now := self._reloads()) == before:
            if time.monotonic() > until:
                raise NotServed(
                    f"{self.address}: has not reloaded {_RELOAD_S:g} s after SIGHUP to {pid}; is "
                    "that its process?"
                )
            time.sleep(_PAUSE_S)
        if now["refused"] > before["refused"]:
            raise NotServed(f"{self.address}: refuses the model; its log has the reason")

    def _reloads(self) -> dict[str, float]:
        try:
            found = _RELOADS.findall(self._ask("/metrics").decode())
        except HTTPError as error:
            raise NotServed(f"{self.address}: {_reason(error)}") from error
        counts = {"served": 0.0, "refused": 0.0}
        for result, number in found:  # of several models, each has its own
            counts[result] = counts.get(result, 0.0) + float(number)
        return counts


def _reason(error: HTTPError) -> str:
    """What a refusal says; it has a JSON body."""
    if error.code in (401, 403):
        return "needs its key for a reload; set API_KEY here and there, or give --pid"
    try:
        said = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        said = "no reason given"
    return f"answers {error.code} ({said})"
