"""Commands of the serving half, which a run starts as a user would: the two halves share no code but ``common/``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import UserError
from common.hardware import threads_asked_for

HOUSE = Path(__file__).resolve().parents[1]  # the folder of training/ and inference/
_ERROR = re.compile(r"error: (?P<message>.*?)(?: \[[a-z-]+\])?$")
STOP_SECONDS = 10.0


def run_command_of_serving(
    module: str,
    arguments: Sequence[str],
    flag: str,
    say: Callable[[str], None],
    *,
    quiet: bool = False,
) -> None:
    """Run ``python -m MODULE ARGUMENTS`` to its end; it is stopped if this process is asked to stop.

    What it prints to stderr, such as its progress, is passed on line by line to ``say``, except its error; its stdout
    is this process's, or with ``quiet`` nobody's. ``flag``: what asked for it, for errors.

    Raises:
        UserError: it failed; the message is its own error.
    """
    environment = dict(os.environ)
    if (
        threads_asked_for() is None
    ):  # torchrun's 1 is for each of its ranks, but the others wait meanwhile
        environment.pop("OMP_NUM_THREADS", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HOUSE), os.environ.get("PYTHONPATH")))
    )
    sys.stdout.flush()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    error, last = None, ""
    try:
        for line in filter(None, map(str.rstrip, process.stderr)):
            error, last = error or _ERROR.match(line), line
            if not _ERROR.match(line):
                say(line)
        code = process.wait()
    except BaseException:  # StopAsked among others
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if code:
        reason = error["message"] if error else last or f"it ended with exit code {code}"
        raise UserError(
            f"{flag}: python -m {module} failed: {reason}", code="serving-command-failed"
        )
