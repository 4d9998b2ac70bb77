"""What an export leaves if it is stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The signal comes at the worst moment: the folder is there, and nobody has noted its name yet.
_STOPPED_AT_ONCE = """
import os, signal, sys, tempfile
from pathlib import Path
from inference.exporting.stages import end_unfinished, replaced_whole

make = tempfile.mkdtemp
def make_and_stop(**options):
    made = make(**options)
    os.kill(os.getpid(), signal.SIGTERM)
    return made

signal.signal(signal.SIGTERM, end_unfinished)
tempfile.mkdtemp = make_and_stop
with replaced_whole(Path(sys.argv[1]) / "native"):
    print("not reached")
"""


def test_a_signal_while_the_folder_is_created_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED_AT_ONCE, tmp_path], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    assert not list(tmp_path.iterdir())
