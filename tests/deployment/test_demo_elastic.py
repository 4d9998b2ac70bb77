"""The demonstration of a run that outlives its processes, from its start to its verdict."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from training.monitoring.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_demonstration_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "deployment" / "demo_elastic.py", "--output_dir", tmp_path / "demo"]

    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert run.returncode == 0, run.stdout + run.stderr
    told = re.findall(
        r"(Rank 1 is killed|Machine B is lost|Machine C joins), at step|(\d) ranks train, from", run.stdout
    )
    assert [what or int(ranks) for what, ranks in told] == [
        *(3, "Rank 1 is killed", 3, "Machine B is lost", 2, "Machine C joins", 3)
    ]
    assert run.stdout.rstrip().endswith("The run ended as if nothing had happened.")
    assert "\x1b" not in run.stdout
    picture = RunFolder(tmp_path / "demo.run").look()
    assert (picture.state, picture.step, len(picture.statuses)) == ("finished", 250, 3)
