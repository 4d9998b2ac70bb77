"""What a rank and the launcher that may restart it exchange through small files.

Imports nothing slow: an attempt that must not be made ends before the rest is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from common.errors import ForeseenError, StopAsked, UserError
from common.files import write_whole
from common.processes import receive_when_parent_dies

EXIT_CODE_FILE = "exit_code"  # run_ddp.sh writes and reads it, too
BEGUN = "begun"


def exit_if_already_failed() -> None:
    """If an earlier attempt of the same launcher failed for good, end with its exit code."""
    file = _launch_file(EXIT_CODE_FILE)
    if file is not None and file.exists():
        sys.exit(int(file.read_text()))


def begin() -> None:
    """Record for later attempts of this launcher that the run has begun as its flags say."""
    if (file := _launch_file(BEGUN)) is not None:
        file.touch()


def has_begun() -> bool:
    """Whether an earlier attempt of the same launcher called :func:`begin`.

    torchrun's restart count does not say: it does not change when nodes come and go, and an attempt
    may end before it has begun anything.
    """
    return (file := _launch_file(BEGUN)) is not None and file.exists()


@contextlib.contextmanager
def finalize_exit_code() -> Iterator[None]:
    """Make a refusal of flags, data or machine final: every further attempt would only repeat it.

    Once the run has begun, and in later attempts, this no longer applies: what is missing then was
    there before, and may come back.
    """
    try:
        yield
    except UserError as error:
        # Before the file: a rank that is still starting ends when it finds it, and so do all.
        error.say()
        _report_to_launcher(error)
        # Only the first attempt can say that the flags themselves are wrong: later ones ran with
        # the same flags.
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and not has_begun():
            _write_exit_code(error.exit_code)
        raise
    except ForeseenError as error:
        _report_to_launcher(error)
        raise
    except StopAsked as stop:
        _correct_exit_code(stop.exit_code)
        raise


def stopped_exit_code(wanted: int) -> int:
    """The exit code of a run that was asked to stop and has saved.

    If several launchers share the run and restart it, 0 is wrong: a launcher may see its ranks end
    before it hears that a node joins or leaves, would take the run for finished, and the others
    would wait for it forever.
    """
    is_shared = int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    code = wanted or (os.EX_TEMPFAIL if is_shared and restarts > 0 else 0)
    _correct_exit_code(code)
    return code


def end_on_ctrl_c() -> None:
    """Let Ctrl-C end this process with one line while it is loading and has nothing to save."""

    def end(number: int, frame: FrameType | None) -> None:
        # Not with an exception, because an import in progress may catch it.
        StopAsked(128 + number, quiet=os.environ.get("RANK", "0") != "0").say()
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)


def stop_with_launcher() -> None:
    """Receive SIGTERM when torchrun dies; nothing else would signal, end or restart its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        receive_when_parent_dies(signal.SIGTERM)


def _report_to_launcher(error: ForeseenError) -> None:
    """Make torchrun's report on the failed ranks, which is long, end with the actual error."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        message = {"message": error.line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))


def _write_exit_code(code: int) -> None:
    if (file := _launch_file(EXIT_CODE_FILE)) is not None:
        write_whole(file, str(code).encode())


def _correct_exit_code(code: int) -> None:
    """Correct what run_ddp.sh wrote when it was asked to stop."""
    # Under other launchers no stop is final: a node may still join, and the ranks start again.
    if (file := _launch_file(EXIT_CODE_FILE)) is not None and file.exists():
        write_whole(file, str(code).encode())


def attempt_file(name: str) -> Path | None:
    """A file of this attempt alone; None without torchrun."""
    # torchrun empties this folder before it starts the ranks.
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    return error_file.parents[1] / name if error_file.name == "error.json" else None


def _launch_file(name: str) -> Path | None:
    """A file next to this launcher's attempts, each of which has a folder of its own."""
    file = attempt_file(name)
    return file and file.parents[1] / name
