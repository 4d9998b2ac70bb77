"""Commands of another part, which are started as a user would: the parts share no code but
``common/``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from common.errors import UserError
from common.hardware import threads_asked_for

HOUSE = Path(__file__).resolve().parents[1]  # the folder of training/ and inference/
_ERROR = re.compile(r"error: (?P<message>.*?)(?: \[[a-z-]+\])?$")
STOP_SECONDS = 10.0


def run_module(
    module: str,
    arguments: Sequence[str],
    flag: str,
    say: Callable[[str], None],
    *,
    quiet: bool = False,
    also_good: Collection[int] = (),
) -> int:
    """Run ``python -m MODULE ARGUMENTS`` to its end; it is stopped if this process is asked to
    stop.

    What it prints to stderr, such as its progress, is passed on line by line to ``say``, except its
    error; its stdout is this process's, or with ``quiet`` nobody's. ``flag``: what asked for it,
    for errors.

    Returns:
        Its exit code: 0, or one of ``also_good``.

    Raises:
        UserError: it failed; the message is its own error.
    """
    # Both processes write to the same stdout: what still waits in this one's buffer comes first.
    sys.stdout.flush()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    error, last = None, ""
    try:
        for line in filter(None, map(str.rstrip, process.stderr)):
            found, last = _ERROR.match(line), line
            # The first error is the cause of the others.
            error = error or found
            if not found:
                say(line)
        code = process.wait()
    # A request to stop is no Exception. The command would go on alone after this process has ended.
    except BaseException:
        _stop(process)
        raise
    if code and code not in also_good:
        reason = error["message"] if error else last or f"it ended with exit code {code}"
        raise UserError(f"{flag}: python -m {module} failed: {reason}", code="command-failed")
    return code


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # torchrun's 1 is for each of its ranks, but the others wait meanwhile.
    if threads_asked_for() is None:
        environment.pop("OMP_NUM_THREADS", None)
    # A server's settings: a teacher is to answer every text, with the columns that were asked for.
    for name in ("COVERAGE", "MAX_ERROR"):
        environment.pop(name, None)
    places = (str(HOUSE), os.environ.get("PYTHONPATH"))
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
