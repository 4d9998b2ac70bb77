"""The errors that serving raises, independent of HTTP and of the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.errors import ForeseenError, UserError
from common.escaping import printable


class RefusedTextError(ValueError):
    """A text that cannot be classified; ``code`` is for programs, such as ``blank_text``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ModelUnavailableError(Exception):
    """No model is loaded (yet); the message says why."""


class SettingsError(UserError):
    """A setting has an invalid value; the message names the setting and what is wrong."""

    code = "setting-value"


class QueueFullError(Exception):
    """The queue cannot accept these texts now, because their answers would come too late.

    ``retry_after_s``: seconds until they would come in time, at the measured speed. ``code``:
    ``call_too_large`` if no waiting helps at that speed, only fewer texts in one call.
    """

    def __init__(self, message: str, retry_after_s: float, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class RateLimitedError(Exception):
    """A client has sent more texts than it may, and may send more after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(Exception):
    """A text was not answered within its time limit."""


class ForwardError(Exception):
    """The model failed on the batch that a text was in."""


class WorkerDownError(Exception):
    """Nothing takes texts from the queue: it is closed, or its workers keep failing."""


class ExportRefusedError(ForeseenError):
    """An artefact answers too differently; ``changed`` has a line for each of the first texts with
    another label.
    """

    code = "export-refused"

    def __init__(self, message: str, changed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.changed = changed

    def say(self) -> None:
        super().say()
        for line in self.changed:
            print(f"  {printable(line)}", file=sys.stderr)
