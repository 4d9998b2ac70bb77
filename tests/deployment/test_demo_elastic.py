"""The demonstration of a run that outlives its processes, from its start to its verdict."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from common.errors import UserError
from deployment import demo_elastic
from training.monitoring.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kept", ["model", "model.run", "model.undisturbed"])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    (tmp_path / kept).mkdir()
    (tmp_path / kept / "model.safetensors").touch()
    monkeypatch.setattr(sys, "argv", ["demo_elastic", "--output_dir", str(tmp_path / "model")])

    with pytest.raises(UserError, match=f"{tmp_path / kept} is not from an earlier demonstration"):
        demo_elastic.main()

    assert (tmp_path / kept / "model.safetensors").exists()


def test_what_an_earlier_demonstration_left_makes_room(tmp_path: Path) -> None:
    names = ("model", "model.run", "model.undisturbed", "model.undisturbed.run")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "model.undisturbed.log").touch()

    demo_elastic.remove_earlier(tmp_path / "model", tmp_path / "model.undisturbed")

    assert not any((tmp_path / name).exists() for name in names)


def test_a_machine_that_comes_late_to_a_start_gives_no_fault_a_second_row(tmp_path: Path) -> None:
    events = []
    for number, (began, step) in enumerate([(0, 0), (100, 20), (140, 25), (200, 60)]):
        moment = {"rank": 0, "restart": number, "step": step}
        events.append({**moment, "kind": "imported", "time": began + 10.0, "process_started": began + 5.0})
        events.append({**moment, "kind": "start", "time": began + 20.0, "world_size": 3})
        events.append({**moment, "kind": "first_step", "time": began + 22.0})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    faults = [demo_elastic.Fault("Rank 1 is killed", 90.0, 29), demo_elastic.Fault("Machine B is lost", 195.0, 70)]

    table = demo_elastic.recovery_table(faults, tmp_path, launcher_log="")

    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    rows = [line.split() for line in console.file.getvalue().splitlines() if "is" in line.split()]
    assert [(row[-9], row[-8], row[-1]) for row in rows] == [("29", "20", "100.0"), ("70", "60", "60.0")]


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
    picture = RunFolder(tmp_path / "demo.run").refresh()
    assert (picture.state, picture.step, len(picture.statuses)) == ("finished", 250, 3)
