"""A search: trials are ordinary runs, values come from Optuna, and whatever stops it, the same command resumes it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from PIL import Image

from common.errors import TrainingFailure, UserError
from tests.deployment.documented import documented
from tests.processes import PythonProcess, wait_until
from tests.training.conftest import REPOSITORY, Run
from training.config import TrainConfig, parse_config
from training.search.processes import Process, share_machine
from training.search.space import OURS, make_dimensions, make_sampler, read_space
from training.search.trials import search

SPACES = sorted((REPOSITORY / "training" / "configs" / "search").glob("*.yaml"))
# 57 training rows: 8 steps per epoch.
CONFIG = {
    "model": "tiny",
    "dataset": "sample",
    "max_train_rows": 63,
    "max_length": 48,
    "precision": "fp32",
    "deterministic": True,
    "device": "cpu",
    "epochs": 2,
    "batch_size": 8,
    "log_every": 1,
}
LEARNING_RATES = {"learning_rate": [0.001, 0.004]}
STEPS_PER_EPOCH = 8

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def write(tmp_path: Path, cache: str) -> Write:
    """`write(config=None, **keys)`: a search over two learning rates, with these fields and keys; None drops one."""

    def write(config: dict[str, Any] | None = None, **keys: Any) -> Path:
        path = tmp_path / "space.yaml"
        fields = CONFIG | {"cache_dir": cache} | (config or {})
        space = {"config": {name: value for name, value in fields.items() if value is not None}, "trials": 2}
        space |= {"search": LEARNING_RATES, "sampler": "grid", "output_dir": str(tmp_path / "found")} | keys
        path.write_text(yaml.safe_dump({key: value for key, value in space.items() if value is not None}))
        return path

    return write


class Started:
    """Starts trials that have imported PyTorch already, and calls ``when(trial, process)`` with each."""

    def __init__(self, when: Callable[[int, PythonProcess], None] = lambda trial, process: None) -> None:
        self.when = when
        self.trials: list[int] = []

    def __call__(self, slot: int, command: Sequence[str], log: Path) -> Process:
        self.trials.append(int(log.parent.name.removeprefix("trial_")))
        process = PythonProcess(command[1:], {**os.environ, "OMP_NUM_THREADS": "1"}, Path.cwd(), [log, log])
        self.when(self.trials[-1], process)
        return process


def _search(path: Path, started: Started | None = None) -> int:
    return search(read_space(path), started or Started(), poll_seconds=0.02)


def _records(folder: Path, trial: int, kind: str) -> list[dict[str, Any]]:
    path = folder / f"trial_{trial:03}" / "model.run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _rows(folder: Path) -> dict[int, dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return {int(row["trial"]): row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_search_may_be_asked_for_more_trials_and_its_best_is_that_of_the_best_validated_epoch(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, first, again, more = tmp_path / "found", Started(), Started(), Started()
    codes = [_search(write(metric="loss", trials=trials), one) for trials, one in ((1, first), (1, again), (2, more))]

    out, rows = capsys.readouterr().out, _rows(folder)
    lowest = {trial: min(one["validation"]["loss"] for one in _records(folder, trial, "epoch")) for trial in (0, 1)}
    best = min(lowest, key=lowest.get)
    assert codes == [0, 0, 0]
    assert (first.trials, again.trials, more.trials) == ([0], [], [1])
    assert {float(row["learning_rate"]) for row in rows.values()} == set(LEARNING_RATES["learning_rate"])
    assert {trial: float(row["loss"]) for trial, row in rows.items()} == lowest
    assert next(iter(rows)) == best
    assert f"Best: trial {best}, loss {lowest[best]:.4f} on the validation rows" in out
    config = parse_config(["--config", str(folder / "best.yaml")], environment={})
    assert config.learning_rate == float(rows[best]["learning_rate"])
    assert config.best_metric == "loss"
    assert config.output_dir == folder / "best"
    assert f"--nproc_per_node=1 training/train_ddp.py --config {folder / 'best.yaml'}" in out
    assert (folder / f"trial_{best:03}" / "model" / "model.safetensors").exists()
    with Image.open(folder / "search.png") as plot:
        assert plot.width > 1000


def test_a_stopped_search_resumes_its_trial_at_the_next_step(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "found"

    def stop(trial: int, process: PythonProcess) -> None:
        def wait_and_stop() -> None:
            wait_until(lambda: _records(folder, trial, "epoch"))
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait_and_stop).start()

    stopped = _search(write(trials=1), Started(stop))
    steps_before = len(_records(folder, 0, "step"))
    resumed = _search(write(trials=1))

    assert (stopped, resumed) == (os.EX_TEMPFAIL, 0)
    assert STEPS_PER_EPOCH <= steps_before < 2 * STEPS_PER_EPOCH
    assert "Resuming from" in (folder / "trial_000" / "output.txt").read_text()
    assert [record["step"] for record in _records(folder, 0, "step")] == list(range(1, 2 * STEPS_PER_EPOCH + 1))


def test_a_trial_that_fails_is_recorded_with_its_error_and_the_search_goes_on(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _search(write(config={"epochs": 1}), Started(lambda trial, process: trial or process.kill()))

    rows = _rows(tmp_path / "found")
    assert code == 0
    assert [row["state"] for row in rows.values()] == ["finished", "failed"]
    assert rows[0]["error"] == "its process was ended by SIGKILL [rank-killed]"
    assert "trial 0 failed: its process was ended by SIGKILL" in capsys.readouterr().out


@pytest.mark.slow
def test_a_value_that_a_run_refuses_fails_its_trial_once_others_have_trained(write: Write, tmp_path: Path) -> None:
    code = _search(write(config={"epochs": 1}, search={"freeze": ["none", "9"]}, seed=1))

    rows = _rows(tmp_path / "found")
    assert code == 0
    assert [(row["freeze"], row["state"]) for row in rows.values()] == [("none", "finished"), ("9", "failed")]
    assert "has 4 blocks; freeze at most that many [flag-value]" in rows[1]["error"]


def test_a_search_in_which_all_trials_fail_says_why(write: Write) -> None:
    with pytest.raises(TrainingFailure, match=r"none of the 2 trials finished; its process was ended by SIGKILL"):
        _search(write(), Started(lambda trial, process: process.kill()))


@pytest.mark.slow
def test_a_trial_behind_the_others_is_pruned_and_keeps_its_checkpoint(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "found"
    rates = {"learning_rate": [1e-7, 0.004]}  # the grid begins with the second
    keys = {"search": rates, "metric": "loss", "pruner": {"median": {"n_startup_trials": 1}}, "seed": 0}
    code = _search(write(config={"epochs": 5}, **keys))

    rows = _rows(folder)
    assert code == 0
    assert [row["state"] for row in rows.values()] == ["finished", "pruned"]
    assert rows[1]["learning_rate"] == "1e-07"
    assert len(_records(folder, 1, "epoch")) < 5
    assert "everything is saved" in (folder / "trial_001" / "output.txt").read_text()


def test_a_wrong_configuration_ends_the_search_at_the_first_trial_and_can_be_put_right(
    write: Write, tmp_path: Path
) -> None:
    first, again = Started(), Started(lambda trial, process: process.kill())
    with pytest.raises(UserError, match=r"^trial 0: .*gone\.csv"):
        _search(write(config={"dataset": str(tmp_path / "gone.csv")}), first)
    with pytest.raises(TrainingFailure):
        _search(write(), again)

    assert (first.trials, again.trials) == ([0], [0, 1])


def test_a_folder_with_trials_of_another_search_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailure):
        _search(write(trials=1), Started(lambda trial, process: process.kill()))
    (tmp_path / "found" / "trial_000" / "model.run").mkdir()

    with pytest.raises(UserError, match="was searched with another config and metric"):
        _search(write(config={"epochs": 3}, metric="loss"))


def test_a_second_search_in_the_same_folder_is_refused(write: Write) -> None:
    space = read_space(write(trials=1))

    def try_again(trial: int, process: PythonProcess) -> None:
        with pytest.raises(UserError, match="use another output_dir"):
            search(space, Started(), poll_seconds=0.02)
        process.kill()

    with pytest.raises(TrainingFailure):
        search(space, Started(try_again), poll_seconds=0.02)


def test_a_sampler_that_starts_again_chooses_what_it_would_have_chosen(write: Write) -> None:
    space = read_space(write(sampler="random", search={"learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}))
    dimensions = make_dimensions(space, "")

    def values(starts: int) -> list[float]:
        study = optuna.create_study()
        chosen = []
        for trial in range(6):
            if trial % (6 // starts) == 0:
                study = optuna.create_study(storage=study._storage, study_name=study.study_name, load_if_exists=True)
            study.sampler = make_sampler(space, dimensions, trial)
            chosen.append(study.ask(dimensions).params["learning_rate"])
        return chosen

    assert values(starts=3) == values(starts=1)
    assert len(set(values(starts=3))) == 6


def test_ranges_and_lists_have_the_types_of_their_fields(write: Write) -> None:
    searched = {
        "gradient_accumulation": {"low": 8, "high": 64, "step": 8},
        "learning_rate": {"low": "1e-5", "high": "1e-3", "log": True},  # as YAML 1.1 reads it
        "weight_decay": {"low": 0, "high": 1e-1},
        "max_length": ["32", 64],
    }
    found = make_dimensions(read_space(write(sampler="tpe", config={"max_length": None}, search=searched)), "")

    assert found == {
        "gradient_accumulation": optuna.distributions.IntDistribution(8, 64, step=8),
        "learning_rate": optuna.distributions.FloatDistribution(1e-5, 1e-3, log=True),
        "weight_decay": optuna.distributions.FloatDistribution(0, 0.1),
        "max_length": optuna.distributions.CategoricalDistribution([32, 64]),
    }


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"trails": 3}, "no key 'trails'; did you mean 'trials'?"),
        ({"trials": 0}, "trials: must be at least 1"),
        ({"metric": "f1"}, "space.yaml: --best_metric f1 and --task classification: this task has accuracy, macro_f1"),
        ({"search": None}, "search: is missing"),
        ({"search": {}}, "search: "),
        ({"search": {"learning_rate": 1e-3}}, "search.learning_rate: must be a list of values, or {low: ..."),
        ({"search": {"learning_rate": {"low": 1e-5, "hihg": 1e-3}}}, "learning_rate.hihg'; did you mean 'high'?"),
        ({"search": {"learning_rate": {"low": "x", "high": 1}}}, "search.learning_rate.low: must be a number"),
        ({"search": {"lr": [1e-3]}}, "search: no field 'lr'; did you mean 'learning_rate'?"),
        ({"config": {"epoch": 3}}, "config: no field 'epoch'; did you mean 'epochs'?"),
        ({"config": {"epochs": 0}}, "config: epochs 0: must be at least 1"),
        ({"config": {"best_metric": "loss"}}, "config.best_metric: every trial has its own; write it as metric"),
        ({"config": {"checkpoint_dir": "x"}}, "config.checkpoint_dir: every trial has its own"),
        ({"config": {"learning_rate": 1e-3}}, "learning_rate is in config and in search; drop one"),
        ({"config": {"metrics_port": 9000}, "at_once": 2}, "config.metrics_port and at_once"),
        ({"search": {"output_dir": ["a"]}}, "search.output_dir: it does not change what the model learns"),
        ({"search": {"strategy": ["ddp"]}}, "search.strategy: it does not change what the model learns"),
        ({"search": {"weight_decay": {"low": 0, "high": 2}}}, "search: weight_decay 2.0: must be less than 1"),
        ({"search": {"schedule": ["linear", "square"]}}, "search: schedule square: must be 'linear'"),
        ({"search": {"schedule": {"low": 1, "high": 2}}}, "search.schedule: takes a list of values"),
        ({"search": {"max_length": {"low": 8, "high": 16.5}}, "config": {"max_length": None}}, "high must be a whole"),
        ({"search": {"weight_decay": {"low": 0.2, "high": 0.1}}}, "search.weight_decay: "),
        ({"search": {"weight_decay": {"low": 0, "high": 0.1, "log": True}}}, "search.weight_decay: "),
        ({"search": {"class_weights": ["auto"], "sampling": ["balanced"]}}, "space.yaml: --class_weights auto and"),
        ({"sampler": "tpee"}, "sampler tpee: must be one of tpe, random, grid"),
        ({"sampler": {"tpe": {"startup": 1}}}, "sampler tpe: no argument 'startup'; Optuna knows"),
        ({"sampler": {"random": {"seed": 1}}}, "sampler random: no argument 'seed'"),
        ({"pruner": {"median": {"n_startup_trials": -1}}}, "pruner median: "),
        ({"search": {"weight_decay": {"low": 0, "high": 0.1}}}, "grid: search.weight_decay needs a list of values"),
        ({"storage": "nothing://here", "sampler": "tpe"}, "the database of the trials does not answer"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_space_is_said_in_one_line_before_anything_starts(
    write: Write, keys: dict[str, Any], line: str
) -> None:
    started = Started()
    with pytest.raises(UserError) as error:
        _search(write(**keys), started)

    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert started.trials == []


@pytest.mark.parametrize("name", ["dataset", "task", "validation_fraction", "max_train_rows", "seed"])
def test_what_changes_the_validation_rows_is_not_searched(write: Write, name: str) -> None:
    with pytest.raises(UserError, match=f"search.{name}: trials with other validation rows cannot be compared"):
        read_space(write(config={name: None}, search={name: [1, 2]}))


def test_a_variable_that_would_win_over_every_trial_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRINEWS_LEARNING_RATE", "0.5")

    with pytest.raises(UserError, match="DISTRINEWS_LEARNING_RATE: would be used by all trials; unset it"):
        read_space(write())


def test_fields_that_the_search_sets_exist() -> None:
    assert set(OURS) <= TrainConfig.model_fields.keys()


PRINTS_ITS_SHARE = (
    "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'],"
    " os.environ.get('CUDA_VISIBLE_DEVICES'))"
)


def test_trials_have_the_threads_that_a_person_asks_for(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    start = share_machine(read_space(write(config={"device": "cpu"})))

    command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    assert start(0, command, tmp_path / "printed.txt").wait() == 0

    assert (tmp_path / "printed.txt").read_text().strip() == "3"


@pytest.mark.parametrize("cores", [1, 2])
def test_trials_at_once_share_cores_and_gpus(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    usable = sorted(os.sched_getaffinity(0))[:cores]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usable)
    try:
        start = share_machine(read_space(write(config={"device": "cuda"}, at_once=2, processes=2)))
        for slot in (0, 1):
            assert start(slot, [sys.executable, "-c", PRINTS_ITS_SHARE], tmp_path / f"{slot}.txt").wait() == 0
    finally:
        os.sched_setaffinity(0, before)

    printed = [(tmp_path / f"{slot}.txt").read_text().strip() for slot in (0, 1)]
    assert printed == [f"[{usable[0]}] 1 0,3", f"[{usable[-1]}] 1 5,7"]


def test_more_trials_than_gpus_are_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    with pytest.raises(UserError, match=r"at_once 2 and processes 2: take 4 GPUs, and this machine has 3"):
        share_machine(read_space(write(config={"device": "auto"}, at_once=2, processes=2)))


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_every_space_that_comes_along_is_valid_and_names_its_command(path: Path) -> None:
    read_space(path)

    assert f"#   python -m training.search {path.relative_to(REPOSITORY)}\n" in path.read_text()


def _pids(folder: Path) -> list[int]:
    """The processes whose command line names a file in this folder: the trials, their launchers and ranks."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("killed", ["the search", "its process group"])
def test_a_killed_search_leaves_no_trial_running_and_resumes_it_where_it_was(
    write: Write, start: Callable[..., Run], tmp_path: Path, processes: int, killed: str
) -> None:
    folder = tmp_path / "found"
    path = write(config={"epochs": 20, "batch_size": 8 // processes, "save_every": 1000}, trials=1, processes=processes)
    command = [sys.executable, "-m", "training.search", path]
    run = start(command, wait=False, cwd=REPOSITORY)
    run.wait_until(lambda: len(_records(folder, 0, "step")) > STEPS_PER_EPOCH)

    (os.kill if killed == "the search" else os.killpg)(run.process.pid, signal.SIGKILL)
    again = start(command, cwd=REPOSITORY)

    assert again.process.returncode == 0, again.err
    output = (folder / "trial_000" / "output.txt").read_text()
    assert "everything is saved" in output
    assert output.count("Resuming from") == 1
    assert [record["step"] for record in _records(folder, 0, "step")] == list(range(1, 20 * STEPS_PER_EPOCH + 1))
    wait_until(lambda: not _pids(folder))


@pytest.mark.slow
def test_a_killed_search_whose_trials_nobody_resumes_leaves_no_process(
    write: Write, start: Callable[..., Run], tmp_path: Path
) -> None:
    folder = tmp_path / "found"
    path = write(config={"epochs": 500, "batch_size": 4}, processes=2)
    run = start([sys.executable, "-m", "training.search", path], wait=False, cwd=REPOSITORY)
    run.wait_until(lambda: _records(folder, 0, "step"))

    os.kill(run.process.pid, signal.SIGKILL)

    wait_until(lambda: not _pids(folder))


@pytest.mark.slow
def test_ctrl_c_stops_all_trials_and_they_resume(write: Write, start: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "found"
    path = write(config={"batch_size": 4, "epochs": 6}, at_once=2, processes=2)
    command = [sys.executable, "-m", "training.search", path]
    run = start(command, wait=False, cwd=REPOSITORY)
    run.wait_until(lambda: _records(folder, 0, "step") and _records(folder, 1, "step"))
    os.killpg(run.process.pid, signal.SIGINT)

    assert run.wait() == os.EX_TEMPFAIL, run.err
    assert "To resume, rerun the same command." in run.out
    assert _pids(folder) == []
    assert start(command, cwd=REPOSITORY).process.returncode == 0
    for trial in (0, 1):
        assert "Resuming from" in (folder / f"trial_{trial:03}" / "output.txt").read_text()
        assert [one["step"] for one in _records(folder, trial, "step")] == list(range(1, 6 * STEPS_PER_EPOCH + 1))


@pytest.mark.slow
def test_the_documented_search_ends_with_a_table_and_the_best_configuration(tmp_path: Path) -> None:
    for name in ("training", "common"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = documented("docs/running.md", "search")
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=tmp_path, env=os.environ | {"PATH": path}, text=True, capture_output=True
    )

    assert done.returncode == 0, done.stderr
    assert "Best: trial " in done.stdout
    assert {"trials.csv", "search.png", "best.yaml"} <= {
        one.name for one in (tmp_path / "checkpoints/search").iterdir()
    }
