"""The SLURM jobs on a real cluster of two nodes: they run, are interrupted, queue again, go on; or fail for good."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployment.documented import REPOSITORY, documented
from tests.deployment.slurm_cluster import DEADLINE, SYSTEM_PATH, Cluster, cluster
from tests.processes import wait_until
from tests.training.conftest import BASE

SCRIPT = REPOSITORY / "deployment" / "slurm" / "train.sbatch"
SCORE = SCRIPT.with_name("score.sbatch")
LAST_STEP = 160
FLAGS = (*BASE, "--epochs", "20", "--batch_size", "4", "--save_every", "4")

# In place of the scorer, whose rows would be done before anything could happen to it.
SCORER = """
import os, signal, sys
from pathlib import Path
print(*sys.argv[1:], flush=True)
started = Path("started_" + os.environ["SLURM_ARRAY_TASK_ID"])
if not started.exists():
    started.touch()
    signal.pause()
"""

# A script of a user's own: in the job's first run it waits for the signal that the time is nearly up.
OWN = """
import os, signal, sys, time
import torch.distributed as dist
def stop(*_):
    print("Stopped at step 5", flush=True)
    os._exit(0)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    signal.signal(signal.SIGUSR1, stop)
    print("ready", flush=True)
    time.sleep(3600)
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), *sys.argv[1:], flush=True)
dist.destroy_process_group()
"""

INTERRUPTIONS = {
    # What `--signal=B:USR1@120` has SLURM do two minutes before the end.
    "the time is nearly up": "scancel --batch --signal=USR1 {job}",
    "a more urgent job comes": "sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap true",
}
REQUEUES = {
    "a node is lost": "scontrol update nodename=node1 state=down reason=lost",
    "someone asks for it": "scontrol requeue {job}",
}


def test_shellcheck_finds_nothing_in_the_launchers() -> None:
    launchers = [SCRIPT, SCORE, REPOSITORY / "training" / "run_ddp.sh"]

    checked = subprocess.run([Path(sys.executable).with_name("shellcheck"), *launchers], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ([SCRIPT, "--epochs", "1"], "training/train_ddp.py"),
        ([SCRIPT, "mine.py", "--epochs", "1"], "mine.py"),
        ([SCORE], "inference/score.py"),
    ],
)
def test_a_job_submitted_from_another_folder_is_refused_in_one_line(
    arguments: list[Path | str], program: str, tmp_path: Path
) -> None:
    given = {"PATH": os.environ["PATH"], "SLURM_JOB_NAME": "distrinews", "SLURM_JOB_ID": "7"}

    ended = subprocess.run(["bash", *arguments], cwd=tmp_path, env=given, capture_output=True, text=True)

    assert ended.returncode == 2
    assert (
        ended.stderr == f"error: {tmp_path}: no {program} here; submit from the repository's root [not-in-repository]\n"
    )


# Stand-ins for SLURM's commands on two nodes, the first with 4 GPUs and the second with 8; REQUEUE is what the
# controller's answer to `scontrol requeue` exits with.
STAND_INS = {
    "scontrol": """
        case "$1 $2" in
          "show hostnames") printf 'node0\\nnode1\\n' ;;
          "show node") echo "NodeName=$3 NodeAddr=127.0.0.1" ;;
          requeue*) exit "$REQUEUE" ;;
        esac
    """,
    "srun": """
        [ "$2" = --export=ALL ] || exec env -i "$0" "$1" --export=ALL "${@:2}" # what it does after sbatch --export=NONE
        output=${3#--output=}
        shift 3
        SLURM_GPUS_ON_NODE=4 "$@" >"${output/\\%n/0}"
        SLURM_GPUS_ON_NODE=8 "$@" >"${output/\\%n/1}"
    """,
    "torchrun": """
        echo "Stopped at step 5"
        echo "$PET_NPROC_PER_NODE ranks: $*"
        env | grep -E '^(PET_RDZV|TORCH_)' || true
    """,
}


def _train_with_stand_ins(folder: Path, requeue: int, nodes: int = 2) -> subprocess.CompletedProcess[str]:
    for name, script in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{textwrap.dedent(script)}")
        (folder / name).chmod(0o755)
    (folder / "own.py").touch()
    given = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHON": str(folder / "torchrun")}
    given |= {"SLURM_JOB_NAME": "distrinews", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes)}
    given |= {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "4", "REQUEUE": str(requeue)}
    return subprocess.run(["bash", SCRIPT, "own.py"], cwd=folder, env=given, capture_output=True, text=True)


def test_a_job_that_slurm_refuses_to_queue_again_fails_and_says_so(tmp_path: Path) -> None:
    ended = _train_with_stand_ins(tmp_path, requeue=1)

    assert ended.returncode == os.EX_TEMPFAIL
    assert ended.stdout.endswith("submit it again, and it resumes [requeue-refused]\n")
    assert "queued again" not in ended.stdout


def test_a_job_that_slurm_queues_again_ends_well(tmp_path: Path) -> None:
    ended = _train_with_stand_ins(tmp_path, requeue=0)

    assert ended.returncode == 0
    assert ended.stdout.endswith("stopped with all saved; asking SLURM to queue it again\n")


def test_each_node_gets_a_rank_for_each_of_its_own_gpus(tmp_path: Path) -> None:
    _train_with_stand_ins(tmp_path, requeue=0)

    started = [(tmp_path / f"distrinews-7.run0.node{node}.out").read_text() for node in (0, 1)]
    assert ["4 ranks" in started[0], "8 ranks" in started[1]] == [True, True], started
    assert "--nproc_per_node" not in "".join(started)


def _meeting(printed: str) -> dict[str, str]:
    """What torchrun was told about where the nodes meet."""
    return dict(line.split("=", 1) for line in printed.splitlines() if line.startswith(("PET_RDZV", "TORCH_")))


def test_where_the_nodes_meet_cannot_be_guessed_from_the_job(tmp_path: Path) -> None:
    meetings = []
    for run in ("first", "second"):
        (folder := tmp_path / run).mkdir()
        _train_with_stand_ins(folder, requeue=0)
        nodes = [(folder / f"distrinews-7.run0.node{node}.out").read_text() for node in (0, 1)]
        assert _meeting(nodes[0]) == _meeting(nodes[1])  # they would not find each other
        meetings.append(_meeting(nodes[0]))
        secret = meetings[-1]["PET_RDZV_ID"]
        assert re.fullmatch("[0-9a-f]{32}", secret)
        assert secret not in next(line for line in nodes[0].splitlines() if "ranks:" in line)  # `ps` shows it to all
        address, _, port = meetings[-1]["PET_RDZV_ENDPOINT"].partition(":")
        assert (address, 20_000 <= int(port) < 32_768) == ("127.0.0.1", True)

    first, second = meetings
    assert first["PET_RDZV_ID"] != second["PET_RDZV_ID"]
    assert first.keys() == second.keys() == {"PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_ENDPOINT"}


def test_a_job_of_one_node_opens_no_port_to_meet_at(tmp_path: Path) -> None:
    ended = _train_with_stand_ins(tmp_path, requeue=0, nodes=1)

    meeting = _meeting((tmp_path / "distrinews-7.run0.node0.out").read_text())
    assert "PET_RDZV_ENDPOINT" not in meeting
    assert meeting["PET_RDZV_CONF"].startswith("store_type=file")
    assert meeting["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "rendezvous at a file" in ended.stdout


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """A cluster of two nodes of one core each."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=SYSTEM_PATH)]
    if missing:
        pytest.skip(f"no {missing[0]} here; on Debian and Ubuntu: apt-get install slurm-wlm")
    with cluster() as started:
        yield started


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to submit from, which the jobs may write into."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("training", "learn", "deployment"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


@pytest.fixture(scope="module")
def submit(slurm: Cluster, checkout: Path) -> Callable[..., int]:
    """`submit(*flags)`: train with these flags on two nodes; returns the number of the job."""

    def submitted(*flags: str | Path) -> int:
        arguments = " ".join(map(str, (*FLAGS, "--cache_dir", checkout / "cache", *flags)))
        return _submit(slurm, checkout, f"sbatch --cpus-per-task=1 deployment/slurm/train.sbatch {arguments}")

    return submitted


@pytest.fixture(scope="module")
def left_alone(slurm: Cluster, submit: Callable[..., int], checkout: Path) -> Path:
    """The model folder of a job that nothing interrupted."""
    output = checkout / "left_alone"
    job = slurm.wait_for_end(submit("--output_dir", output))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), _printed(checkout, int(job["JobId"]))
    return output


def _submit(slurm: Cluster, checkout: Path, command: str) -> int:
    printed = slurm.run(command, cwd=checkout, PYTHON=sys.executable, HF_HUB_OFFLINE="1")
    return int(printed.removeprefix("Submitted batch job "))


def _printed(checkout: Path, job: int, run: int | None = None) -> str:
    """What a job printed, or what its ranks printed in one of its runs."""
    files = f"distrinews-{job}.out" if run is None else f"distrinews-{job}.run{run}.node*.out"
    return "".join(path.read_text() for path in sorted(checkout.glob(files)))


def _weights(output: Path) -> str:
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


def _steps(output: Path) -> list[int]:
    lines = output.with_name(output.name + ".run").joinpath("metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]


def _wait_for_checkpoint(slurm: Cluster, output: Path) -> None:
    checkpoints = output.with_name(output.name + ".run") / "checkpoints"
    wait_until(lambda: list(checkpoints.glob("step_*")), DEADLINE, slurm.logs)


def _assert_whole(output: Path, left_alone: Path) -> None:
    assert _weights(output) == _weights(left_alone)
    assert _steps(output) == list(range(1, LAST_STEP + 1))


@pytest.mark.slow
@pytest.mark.parametrize("why", INTERRUPTIONS)
def test_an_interrupted_job_saves_queues_again_and_goes_on_at_the_next_step(
    slurm: Cluster, submit: Callable[..., int], left_alone: Path, checkout: Path, tmp_path: Path, why: str
) -> None:
    output = tmp_path / "model"
    job = submit("--output_dir", output)
    _wait_for_checkpoint(slurm, output)

    slurm.run(INTERRUPTIONS[why].format(job=job))

    ended = slurm.wait_for_end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    stopped = re.search(r"^Stopped at step (\d+); everything is saved", _printed(checkout, job, run=0), re.MULTILINE)
    assert stopped, _printed(checkout, job, run=0)
    assert f"step_{int(stopped[1]):08d} (--resume none" in _printed(checkout, job, run=1)
    assert "run0 stopped with all saved; asking SLURM to queue it again\n" in _printed(checkout, job)
    assert "run1 finished\n" in _printed(checkout, job)
    _assert_whole(output, left_alone)


@pytest.mark.slow
@pytest.mark.parametrize("why", REQUEUES)
def test_a_job_that_slurm_itself_starts_again_goes_on_from_its_last_checkpoint(
    slurm: Cluster, submit: Callable[..., int], left_alone: Path, checkout: Path, tmp_path: Path, why: str
) -> None:
    output = tmp_path / "model"
    job = submit("--output_dir", output)
    _wait_for_checkpoint(slurm, output)

    slurm.run(REQUEUES[why].format(job=job))

    ended = slurm.wait_for_end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert "Resuming from" in _printed(checkout, job, run=1)
    _assert_whole(output, left_alone)


@pytest.mark.slow
def test_a_cancelled_job_saves_and_does_not_queue_again(
    slurm: Cluster, submit: Callable[..., int], checkout: Path, tmp_path: Path
) -> None:
    job = submit("--output_dir", tmp_path / "model")
    _wait_for_checkpoint(slurm, tmp_path / "model")

    slurm.run(f"scancel {job}")

    ended = slurm.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    assert "everything is saved" in _printed(checkout, job, run=0)


@pytest.mark.slow
def test_a_wrong_flag_fails_the_job_with_one_line_and_without_another_try(
    slurm: Cluster, submit: Callable[..., int], checkout: Path, tmp_path: Path
) -> None:
    job = submit("--output_dir", tmp_path / "model", "--epoch", "3")

    ended = slurm.wait_for_end(job)

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")
    errors = [line for line in _printed(checkout, job).splitlines() if line.startswith("error:")]
    assert errors == ["error: --epoch: no such flag; did you mean --epochs? [flag-unknown]"]


@pytest.mark.slow
def test_the_documented_job_trains_a_model(slurm: Cluster, checkout: Path) -> None:
    job = _submit(slurm, checkout, documented("docs/deployment.md", "slurm-submit"))

    ended = slurm.wait_for_end(job)

    assert ended["JobState"] == "COMPLETED", _printed(checkout, job)
    assert (checkout / "checkpoints" / "slurm_demo" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_documented_job_with_another_script_runs_that_script(slurm: Cluster, checkout: Path) -> None:
    job = _submit(slurm, checkout, documented("docs/deployment.md", "slurm-script"))

    ended = slurm.wait_for_end(job)

    assert ended["JobState"] == "COMPLETED", _printed(checkout, job)
    assert "epoch 1/1  loss" in _printed(checkout, job, run=0)


@pytest.mark.slow
def test_a_script_that_stops_when_asked_queues_again_with_its_flags(slurm: Cluster, checkout: Path) -> None:
    (checkout / "own.py").write_text(OWN)
    job = _submit(slurm, checkout, "sbatch --cpus-per-task=1 deployment/slurm/train.sbatch own.py --data here")
    wait_until(lambda: _printed(checkout, job, run=0).count("ready\n") == 2, DEADLINE, slurm.logs)

    slurm.run(INTERRUPTIONS["the time is nearly up"].format(job=job))

    ended = slurm.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), _printed(checkout, job)
    lines = _printed(checkout, job, run=1).splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == [
        f"rank {rank} of 2 --data here" for rank in (0, 1)
    ]


@pytest.fixture
def rows(slurm: Cluster, tmp_path: Path) -> Path:
    """A folder to score rows in, with a scorer whose first start in each task lasts until it is ended."""
    (tmp_path / "deployment").symlink_to(REPOSITORY / "deployment")
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "__init__.py").touch()
    (tmp_path / "inference" / "score.py").write_text(SCORER)
    return tmp_path


@pytest.mark.slow
def test_the_documented_array_scores_with_every_task(slurm: Cluster, rows: Path) -> None:
    array = _submit(slurm, rows, documented("docs/deployment.md", "slurm-score"))

    for task in range(2):
        wait_until(lambda task=task: (rows / f"started_{task}").exists(), DEADLINE, slurm.logs)
        slurm.run(f"scancel --batch --signal=USR1 {array}_{task}")
        ended = slurm.wait_for_end(f"{array}_{task}")
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1")
        printed = (rows / f"distrinews-score-{array}_{task}.out").read_text()
        assert printed.count("rows out --model checkpoints/sample\n") == 2
        assert f"distrinews-score-{array}_{task}.run0: the time is up; asking SLURM to queue it again\n" in printed
        assert printed.endswith(f"distrinews-score-{array}_{task}.run1: finished\n")
