"""The errors that serving raises, each with one line for whoever reads it; free of HTTP and of the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.errors import ForeseenError, UserError


class RefusedTextError(ValueError):
    """A text that cannot be classified as it stands.

    Attributes:
        code: A short name of the reason for programs, such as ``blank_text``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ModelUnavailableError(Exception):
    """No model is loaded (yet); the line says why."""


class SettingsError(UserError):
    """A setting has no valid value; the line names it and says what is wrong."""

    code = "setting-value"


class QueueFullError(Exception):
    """The queue cannot take these texts now: their answers would come too late.

    Attributes:
        retry_after_s: Seconds until they would come in time, by the measured speed.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitedError(Exception):
    """A client has sent more texts than it may.

    Attributes:
        retry_after_s: Seconds until it may send more.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(Exception):
    """A text was not answered in the time it had."""


class ForwardError(Exception):
    """The model failed on the batch that a text was in."""


class WorkerDownError(Exception):
    """Nothing takes texts from the queue: it was closed, or its workers fail again and again."""


class ExportRefusedError(ForeseenError):
    """An artefact answers too differently from its reference to be kept.

    Args:
        changed: One line for each of the first texts whose label changed.
    """

    code = "export-refused"

    def __init__(self, message: str, changed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.changed = changed

    def say(self) -> None:
        """Print the error, then the texts."""
        super().say()
        for line in self.changed:
            print(f"  {line}", file=sys.stderr)
