"""What a person can cause and mend: one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2


class UserError(Exception):
    """Bad input or a bad environment; the message is all that is shown, the exit code is 2."""


class TrainingFailure(Exception):
    """Training itself went wrong (a non-finite loss, memory); the message is shown, the exit code is 1."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's main function and turn its foreseen errors into one line and an exit code.

    Ranks other than the first stay silent about an error that the first one reports (``quiet`` on it).
    """
    try:
        code = main() or 0
    except (UserError, TrainingFailure) as error:
        if not getattr(error, "quiet", False):
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_USER_ERROR if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = 1
    sys.exit(code)
