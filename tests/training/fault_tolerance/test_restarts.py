"""Restarts: a killed rank costs no row, a refusal and a stop are not tried again, ranks go with their launcher."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.inference.servers import free_port
from tests.processes import wait_until
from tests.training.monitoring.small_training import train_on_ranks
from training.monitoring.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "training" / "run_ddp.sh"
STOPPED = "Stopped before the first step, nothing to save. To resume, rerun the same command."
TWO_RANKS = ("--batch_size", "4", "--save_every", "3", "--keep_last", "9")

# What a rank does around its training, without the training.
RANK = """
import os, pathlib, sys
from common.errors import StopAsked, UserError
from training.distributed.restarts import begin, exit_if_already_failed, finalize_exit_code, stopped_exit_code

exit_if_already_failed()
if "SCRIPT_ASKED" in os.environ:  # run_ddp.sh has had a SIGTERM meanwhile
    pathlib.Path(os.environ["SCRIPT_ASKED"]).write_text("143")
with finalize_exit_code():
    match sys.argv[1]:
        case "refused": raise UserError("--epochs 0")
        case "lacking":
            begin()
            raise UserError("s3://bucket/run: does not answer")
        case "asked": raise StopAsked(77, quiet=True)
        case "stopped": sys.exit(stopped_exit_code(int(sys.argv[2])))
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[..., int]:
    """`attempt(number, *what, **variables)`: the exit code of a rank in a launcher's attempt of that number."""

    def run(number: int, *what: str, **variables: str) -> int:
        folder = tmp_path / "launch" / f"attempt_{number}" / "0"
        folder.mkdir(parents=True, exist_ok=True)
        torchrun = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), "TORCHELASTIC_RESTART_COUNT": str(number)}
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **torchrun, **variables}
        return subprocess.run([sys.executable, "-c", RANK, *what], env=environment, capture_output=True).returncode

    return run


def test_a_refused_launch_is_never_retried(attempt: Callable[..., int], tmp_path: Path) -> None:
    assert attempt(0, "refused") == 1  # uncaught here: run_command makes it 2
    assert (tmp_path / "launch" / "exit_code").read_text() == "2"

    assert attempt(1, "stopped", "0") == 2


def test_what_is_missing_in_a_later_attempt_is_retried(attempt: Callable[..., int]) -> None:
    attempt(1, "refused")

    assert attempt(2, "stopped", "0") == 0


def test_what_is_missing_once_a_run_has_begun_is_retried(attempt: Callable[..., int], tmp_path: Path) -> None:
    assert attempt(0, "lacking") == 1
    assert not (tmp_path / "launch" / "exit_code").exists()

    assert attempt(1, "stopped", "0") == 0


@pytest.mark.parametrize("what", [("asked",), ("stopped", "77"), ("stopped", "0")])
def test_a_stop_is_final_only_if_the_launching_script_was_asked(
    attempt: Callable[..., int], tmp_path: Path, what: tuple[str, ...]
) -> None:
    verdict = tmp_path / "launch" / "exit_code"

    attempt(0, *what)
    assert not verdict.exists()

    attempt(1, *what, SCRIPT_ASKED=str(verdict))
    assert attempt(2, "stopped", "5") == int(verdict.read_text()) == (0 if what[-1] == "0" else 77)


@pytest.mark.parametrize(
    ("wanted", "launchers", "restarts", "code"),
    [("0", "1", "3", 0), ("0", "2", "0", 0), ("0", "2", "3", os.EX_TEMPFAIL), ("9", "2", "3", 9), ("9", "1", "0", 9)],
)
def test_launchers_that_share_a_run_never_mistake_a_stop_for_the_end(
    attempt: Callable[..., int], wanted: str, launchers: str, restarts: str, code: int
) -> None:
    torchrun = {"GROUP_WORLD_SIZE": launchers, "TORCHELASTIC_MAX_RESTARTS": restarts}

    assert attempt(0, "stopped", wanted, **torchrun) == code


def test_max_restarts_must_be_a_number(start: Callable[..., Any]) -> None:
    run = start(["bash", SCRIPT, 2], env={"PYTHON": sys.executable, "MAX_RESTARTS": "some"})

    assert run.process.returncode == 2
    assert run.err == "error: MAX_RESTARTS=some: must be a whole number, 0 = off [flag-value]\n"


@pytest.fixture(scope="module")
def left_alone(
    run_on_ranks: Callable[..., Any], base_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run folder of a run on two ranks that nobody disturbed."""
    output = tmp_path_factory.mktemp("alone") / "model"
    run_on_ranks(2, train_on_ranks, [*base_flags, *TWO_RANKS, "--output_dir", str(output)])
    return output.with_name("model.run")


@pytest.mark.slow  # test_killed.py of the faults has one for every day
def test_a_run_whose_killed_rank_is_restarted_ends_like_an_undisturbed_one(
    start: Callable[..., Any],
    base_flags: tuple[str, ...],
    left_alone: Path,
    checkpoint_state: Callable[..., Any],
    metrics_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "model.run"
    # That --resume none counts for the first attempt alone is part of it.
    command = ["bash", SCRIPT, 2, *base_flags, *TWO_RANKS, "--resume", "none", "--output_dir", tmp_path / "model"]
    run = start(command, wait=False, env={"PYTHON": sys.executable, "MAX_RESTARTS": "2"})
    run.wait_until(lambda: (run_dir / "checkpoints" / "latest").exists())
    alive = RunFolder(run_dir).refresh()

    os.kill(run.ranks[1], signal.SIGKILL)

    assert run.wait() == 0, run.err
    assert [alive.state, RunFolder(run_dir).refresh().state] == ["running", "finished"]
    assert RunFolder(run_dir).refresh().starts == 2
    assert [record["step"] for record in metrics_of(run_dir)] == list(range(1, 17))
    ours, theirs = checkpoint_state(run_dir, 16), checkpoint_state(left_alone, 16)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


@pytest.mark.slow
def test_a_wrong_flag_is_refused_once_however_many_restarts_there_are(start: Callable[..., Any]) -> None:
    run = start(["bash", SCRIPT, 2, "--epochs", "0"], env={"PYTHON": sys.executable, "MAX_RESTARTS": "3"})

    assert run.process.returncode == 2
    assert run.error_lines == ["error: --epochs 0: must be at least 1 [flag-value]"]


@pytest.mark.slow
def test_a_stopped_run_is_not_started_again_and_ends_with_the_code_that_was_asked_for(
    start: Callable[..., Any], base_flags: tuple[str, ...], tmp_path: Path
) -> None:
    flags = (*base_flags, *TWO_RANKS, "--stopped_exit_code", "75", "--output_dir", tmp_path / "model")
    run = start(["bash", SCRIPT, 2, *flags], wait=False, env={"PYTHON": sys.executable, "MAX_RESTARTS": "3"})
    run.wait_until(lambda: "step 2/" in run.out)

    os.kill(run.process.pid, signal.SIGTERM)

    assert run.wait() == 75, run.err
    assert run.out.count("everything is saved. To resume, rerun the same command.") == 1
    assert RunFolder(tmp_path / "model.run").refresh().starts == 1


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_end(
    launch: Callable[..., Any], tmp_path: Path, metrics_of: Callable[..., Any]
) -> None:
    run = launch(2, *TWO_RANKS, "--epochs", "99", "--output_dir", tmp_path / "model", wait=False, warm=False)
    run.wait_until(lambda: "step 1/" in run.out)
    ranks = run.ranks

    run.process.kill()

    run.process.wait()
    for pid in ranks:
        _wait_until_gone(pid)
    folder = RunFolder(tmp_path / "model.run").refresh()
    assert folder.state == "stopped"
    assert folder.checkpoint["step"] == metrics_of(tmp_path / "model.run")[-1]["step"]


def _wait_until_gone(pid: int) -> None:
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), otherwise=lambda: f"process {pid} still runs")


@pytest.mark.parametrize("kind", ["UserError", "TrainingFailure"])
def test_the_launchers_report_ends_with_the_error_of_the_rank(tmp_path: Path, kind: str) -> None:
    code = f"from common.errors import {kind}\nfrom training.distributed.restarts import finalize_exit_code\n"
    code += f"with finalize_exit_code(): raise {kind}('--epochs 0: must be at least 1', code='flag-value')"
    error_file = tmp_path / "launch" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    variables = {"TORCHELASTIC_ERROR_FILE": str(error_file), "TORCHELASTIC_RESTART_COUNT": "0"}

    subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, cwd=REPOSITORY, capture_output=True)

    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(error_file))
    report = ChildFailedError("training/train_ddp.py", {0: failure}).format_msg()
    assert "  traceback : --epochs 0: must be at least 1 [flag-value]\n" in report


@pytest.mark.parametrize(
    ("rank", "code", "line"),
    [
        pytest.param(
            *("import sys; print('error: --epochs 0', file=sys.stderr); sys.exit(2)", 2, r"error: --epochs 0"),
            marks=pytest.mark.slow,
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            1,
            r"error: rank 0 \(process \d+\) was ended by SIGKILL; .* lower --batch_size \[rank-killed\]",
        ),
    ],
    ids=["a rank that says why", "a rank that is killed"],
)
def test_the_script_prints_one_line_about_a_failed_rank(
    start: Callable[..., Any], tmp_path: Path, rank: str, code: int, line: str
) -> None:
    folder = tmp_path / "training"
    folder.mkdir()
    for name in ("run_ddp.sh", "launch.py"):
        shutil.copy(SCRIPT.with_name(name), folder)
    (folder / "train_ddp.py").write_text(rank)

    run = start(["bash", folder / "run_ddp.sh", 1], env={"PYTHON": sys.executable})

    assert run.process.returncode == code
    assert re.fullmatch(line + "\n", run.err), run.err


@pytest.mark.parametrize(
    "rendezvous",
    [
        ("--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_conf=is_host=0,read_timeout=1"),
        ("--node_rank=1", "--master_addr=127.0.0.1", "--master_port={port}", "--rdzv_conf=timeout=1"),
    ],
    ids=["c10d", "static"],
)
def test_a_launcher_that_cannot_reach_the_others_says_so_and_asks_to_be_started_again(
    start: Callable[..., Any], rendezvous: tuple[str, ...]
) -> None:
    flags = [flag.format(port=free_port()) for flag in rendezvous]

    run = start([sys.executable, SCRIPT.with_name("launch.py"), "--nnodes=2", *flags, "own.py"], warm=True)

    assert run.process.returncode == os.EX_TEMPFAIL, run.err
    assert run.error_lines[-1].startswith("error: the other nodes are out of reach at 127.0.0.1")
    assert run.error_lines[-1].endswith("[rendezvous-lost]")


def test_ctrl_c_while_the_launcher_loads_ends_in_one_line(start: Callable[..., Any]) -> None:
    run = start(["bash", SCRIPT, 2], wait=False, env={"PYTHON": sys.executable})
    run.wait_until(lambda: _loads_torch_below(run.process.pid))

    os.kill(run.process.pid, signal.SIGINT)

    assert run.wait() == 130
    assert run.out.splitlines() == [STOPPED]
    assert run.err == ""


# A launcher with a child before its folder exists, and what would follow if only that child were ended.
LAUNCHER_WITH_A_CHILD = """
import pathlib, subprocess, sys

child = subprocess.Popen(["sleep", "60"])
print("has a child", flush=True)
child.wait()
[logs] = [flag.partition("=")[2] for flag in sys.argv if flag.startswith("--log_dir=")]
folder = pathlib.Path(logs, "launch")
folder.mkdir()
(folder / "exit_code").write_text("2")
"""


def test_ctrl_c_ends_a_launcher_that_has_children_but_no_ranks_yet(start: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "launch.py").write_text(LAUNCHER_WITH_A_CHILD)
    run = start(["bash", tmp_path / SCRIPT.name, 2], wait=False, env={"PYTHON": sys.executable})
    run.wait_until(lambda: "has a child" in run.out)

    os.kill(run.process.pid, signal.SIGINT)

    assert run.wait() == 130
    assert STOPPED in run.out


def test_ctrl_c_while_training_loads_ends_in_one_line(start: Callable[..., Any]) -> None:
    run = start([sys.executable, SCRIPT.with_name("train_single.py")], wait=False)
    run.wait_until(lambda: _loads_torch(run.process.pid))

    run.process.send_signal(signal.SIGINT)

    assert run.wait() == 130
    assert run.out.splitlines() == [STOPPED]
    assert run.err == ""


def _loads_torch_below(pid: int) -> bool:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(_loads_torch(int(child)) for child in children)


def _loads_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False
