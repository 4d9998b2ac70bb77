"""The picture of a run in a terminal: while it trains, afterwards, and whatever is missing or torn."""

import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from common.errors import run_command
from tests.processes import made_once, run_on_ranks
from tests.training.monitoring.small_training import train_on_ranks
from training import watch
from training.distributed.ranks import Ranks
from training.monitoring.events import RunStarted, StepsAgreed
from training.monitoring.phases import Phases
from training.monitoring.records import SavedCheckpoint, StepMetrics
from training.monitoring.run_folder import RunFolder
from training.monitoring.status import StatusFile, read_statuses, status_path
from training.watch import draw, sparkline

WIDTH = 80


def _frame(folder: RunFolder, width: int = WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    console.print(draw(folder.refresh()))
    return console.file.getvalue()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`watched(*arguments)`: exit code and output of the command."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["watch", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_command(watch.main)
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    return run


def test_two_runs_are_compared_by_the_settings_in_which_they_differ_and_by_their_figures(
    trained: Path, watched: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    other = tmp_path / "other.run"
    shutil.copytree(trained, other)
    assert "Their settings are the same." in watched(trained, other)[1]
    (other / "config.yaml").write_text((trained / "config.yaml").read_text().replace("batch_size: 4", "batch_size: 8"))
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["kind"] == "test":
            record["accuracy"] = 0.125
    (other / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    code, told = watched(trained, other)
    assert code == 0
    rows = {line.rsplit(None, 2)[0].strip(): line.split()[-2:] for line in told.splitlines() if line.strip()}
    assert rows["run"] == ["model.run", "other.run"]
    assert rows["batch_size"] == ["4", "8"]
    assert not {"epochs", "output_dir"} & set(rows)
    assert rows["state"] == ["finished", "finished"]
    assert rows["test accuracy"][1] == "12.50%"


def test_a_folder_that_is_no_run_is_refused_beside_one_that_is(
    trained: Path, watched: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, told = watched(trained, tmp_path)
    assert code == 2
    assert f"{tmp_path}: not the folder of a training run" in told


@pytest.fixture(scope="module")
def trained(base_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks that have finished."""

    def train(folder: Path) -> None:
        flags = ("--epochs", "1", "--batch_size", "4", "--output_dir", str(folder / "model"))
        run_on_ranks(2, train_on_ranks, [*base_flags, *flags])

    return made_once(tmp_path_factory, "watched", train) / "model.run"


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage, next to a model folder."""
    (tmp_path / "model").mkdir()
    return shutil.copytree(trained, tmp_path / "model.run")


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[tuple[Path, StatusFile]]:
    """The run folder of this very process as rank 0 of two, 40 of 100 steps done, in its backward pass."""
    ranks, phases = Ranks(0, 2, 0, 2, torch.device("cpu"), "gloo"), Phases()
    phases.step, phases.now = 40, "backward"
    steps = [StepMetrics(step, 1, 2 - step / 40, 1e-3, 1.0, 80.0, 3000.0, step / 10, 8) for step in range(1, 41)]
    with StatusFile(tmp_path, ranks, phases) as status:
        status.receive(RunStarted(0, 100, []))
        status.receive(StepsAgreed(steps))
        status.receive(SavedCheckpoint(30, 0.01, 0.2, 24_000_000))
        status.write()
        lines = [json.dumps({"kind": "step", **asdict(step)}) for step in steps]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        yield tmp_path, status


def test_a_finished_run_is_shown_in_one_frame(finished: Path, watched: Callable[..., tuple[int, str]]) -> None:
    code, frame = watched(finished)

    assert code == 0
    assert "model.run  finished  tiny, sample, ddp, 2 ranks" in frame
    assert "step 8/8" in frame
    assert "checkpoint of step 8" in frame
    assert [status.pid for status in read_statuses(finished)] == [
        int(pid) for pid in re.findall(r"(\d+) finished", frame)
    ]
    assert "first step" in frame
    assert "\x1b" not in frame


def test_a_finished_run_that_was_started_again_shows_its_last_epoch_and_checkpoint(finished: Path) -> None:
    for path in (finished / "ranks").glob("*.json"):
        status = json.loads(path.read_text())
        # Processes that resume a finished run test and write the model, and take no step.
        path.write_text(json.dumps(status | {"epoch": 0, "last_checkpoint_step": None, "last_checkpoint_time": None}))

    frame = _frame(RunFolder(finished))

    assert "epoch 1" in frame
    assert "checkpoint of step 8, by an earlier start of this run" in frame


def test_a_running_run_shows_each_rank_and_the_time_left(alive: tuple[Path, StatusFile]) -> None:
    frame = _frame(RunFolder(alive[0]))

    assert re.search(rf" {os.getpid()} running +backward 0s +40 ", frame)
    assert "step 40/100" in frame
    assert "ETA 6.0s" in frame  # a tenth of a second a step
    assert "checkpoint of step 30, 0.0s ago" in frame
    assert "80 samples/s" in frame


def test_no_line_is_wider_than_the_terminal(alive: tuple[Path, StatusFile], finished: Path) -> None:
    for folder in (alive[0], finished):
        for width in (80, 120):
            assert max(map(len, _frame(RunFolder(folder), width).splitlines())) <= width


def test_a_rank_that_no_longer_writes_is_called_silent(alive: tuple[Path, StatusFile]) -> None:
    run_dir, status = alive
    folder = RunFolder(run_dir)
    assert folder.refresh().state == "running"

    gone = asdict(status.status) | {"rank": 1, "written": time.time() - 60}
    status_path(run_dir, 1).write_text(json.dumps(gone))

    assert "silent 1m 00s" in _frame(folder)
    assert folder.refresh().state == "running"  # rank 0 is


def test_another_machines_clock_is_never_compared_with_ours(alive: tuple[Path, StatusFile]) -> None:
    run_dir, status = alive
    elsewhere = asdict(status.status) | {"rank": 1, "host": "elsewhere", "written": time.time() - 3600}
    status_path(run_dir, 1).write_text(json.dumps(elsewhere))

    picture = RunFolder(run_dir).refresh()

    assert picture.has_remote_ranks
    assert not any(picture.is_silent(status) for status in picture.statuses)


def test_a_rank_that_died_on_another_machine_is_not_called_running(
    alive: tuple[Path, StatusFile], watched: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, status = alive
    elsewhere = asdict(status.status) | {"rank": 1, "host": "elsewhere"}
    status_path(run_dir, 1).write_text(json.dumps(elsewhere))
    now = time.monotonic()

    def sleep(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
        status.write()  # as rank 0 does in any second

    monkeypatch.setattr(time, "sleep", sleep)

    _, frame = watched(run_dir, "--once")

    assert f"{os.getpid()} running" in frame
    assert re.search(r" elsewhere +\d+ silent 6s ", frame)


def test_a_resumed_run_shows_what_it_is_now(alive: tuple[Path, StatusFile]) -> None:
    run_dir, _ = alive
    (run_dir / "config.yaml").write_text("strategy: ddp\n")
    folder = RunFolder(run_dir)
    assert folder.refresh().config == {"strategy": "ddp"}

    (run_dir / "new").write_text("strategy: zero3\n")
    (run_dir / "new").replace(run_dir / "config.yaml")

    assert folder.refresh().config == {"strategy": "zero3"}


def test_a_run_that_was_moved_aside_is_not_mixed_with_the_new_one(alive: tuple[Path, StatusFile]) -> None:
    run_dir, _ = alive
    start, saved = {"kind": "start", "time": 1.0}, {"kind": "checkpoint", "time": 2.0, "step": 30}
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, start, saved)))
    folder = RunFolder(run_dir)
    assert (folder.refresh().starts, len(folder.refresh().events)) == (2, 3)

    (run_dir / "new").write_text(json.dumps(start) + "\n")
    (run_dir / "events.jsonl").rename(run_dir / "events.old")
    (run_dir / "new").rename(run_dir / "events.jsonl")

    picture = folder.refresh()
    assert (picture.starts, len(picture.events), picture.checkpoint) == (1, 1, None)


def test_a_frame_fits_the_terminal_and_shows_ranks_that_need_attention_first(
    alive: tuple[Path, StatusFile],
) -> None:
    run_dir, status = alive
    for rank in range(1, 30):
        state = {"state": "failed", "message": "out of memory " * 12} if rank == 23 else {}
        status_path(run_dir, rank).write_text(json.dumps(asdict(status.status) | {"rank": rank} | state))
    console = Console(file=io.StringIO(), width=WIDTH, height=24, markup=False, highlight=False, emoji=False)

    console.print(watch.fit_to_height(RunFolder(run_dir).refresh(), console))

    lines = console.file.getvalue().splitlines()
    assert 20 < len(lines) <= 24
    assert [line for line in lines if line.startswith("rank 23: out of memory")]
    assert [line for line in lines if re.match(r" +23 .* failed", line)]
    assert "more ranks" in lines[-1]


def test_of_failed_ranks_those_that_only_lost_another_are_not_shown(alive: tuple[Path, StatusFile]) -> None:
    run_dir, status = alive
    lost = "lost at step 41: a connection ended; rank 5 (host a, process 7) failed"
    for rank in range(1, 7):
        said = {"state": "failed", "message": "out of memory" if rank == 5 else lost}
        status_path(run_dir, rank).write_text(json.dumps(asdict(status.status) | {"rank": rank} | said))

    frame = _frame(RunFolder(run_dir))
    assert "rank 5: out of memory" in frame
    assert "lost at step" not in frame

    status_path(run_dir, 5).unlink()
    assert "rank 1: lost at step 41" in _frame(RunFolder(run_dir))


def test_a_rank_that_was_slow_is_not_called_so_once_it_has_ended(alive: tuple[Path, StatusFile]) -> None:
    run_dir, status = alive
    status.status.slow_phases = ["data", "forward"]
    status.write()
    assert "rank 0 is slower than the others in: data, forward" in _frame(RunFolder(run_dir))

    status.status.state = "finished"
    status.write()

    frame = _frame(RunFolder(run_dir))
    assert f"{os.getpid()} finished" in frame
    assert "slower" not in frame


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.yaml", "ranks/rank_00000.json"])
def test_a_truncated_or_missing_file_spoils_only_its_part_of_the_frame(finished: Path, name: str) -> None:
    path = finished / name
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 23)):
        path.write_bytes(whole[:size])
        assert "step " in _frame(RunFolder(finished))
    for torn in (b'{"kind": "step"}\n[]\n', b"\xff\xfe\x00", b"null\n"):
        path.write_bytes(torn)
        _frame(RunFolder(finished))
    path.unlink()

    assert "step 8" in _frame(RunFolder(finished))


def test_new_lines_are_read_and_replaced_files_are_read_from_the_start(alive: tuple[Path, StatusFile]) -> None:
    run_dir, _ = alive
    folder = RunFolder(run_dir)
    assert len(folder.refresh().losses) == 40
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)

    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(lines[0][:-10])  # half a line: the run is writing it now
        file.flush()
        assert len(folder.refresh().losses) == 40
        file.write(lines[0][-10:])
    assert len(folder.refresh().losses) == 41

    (run_dir / "new").write_text("".join(lines[:5]))
    shutil.move(run_dir / "new", run_dir / "metrics.jsonl")
    assert len(folder.refresh().losses) == 5


def test_a_folder_that_is_no_run_is_refused_in_one_line(
    finished: Path, tmp_path: Path, watched: Callable[..., tuple[int, str]]
) -> None:
    code, line = watched(tmp_path / "gone")
    assert (code, line.count("\n")) == (2, 1)
    assert line.startswith(f"error: {tmp_path}/gone: not the folder of a training run")

    code, line = watched(finished.with_name("model"))
    assert code == 2
    assert line.endswith(f"did you mean {finished}? [not-a-run]\n")


def test_a_curve_is_drawn_from_its_lowest_to_its_highest_value() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0, 3.0, 1.0, 3.0], cells=2) == "▁▁"
    assert sparkline([]) == ""


def test_names_in_the_files_of_a_run_cannot_command_the_terminal(finished: Path) -> None:
    name, snapshot = "a\x1b[2J\n\x07", RunFolder(finished).refresh()
    snapshot.name, snapshot.config["dataset"] = name, name
    snapshot.statuses[0] = replace(snapshot.statuses[0], host=name, state="failed", message=name)
    snapshot.events.append({"kind": name, "time": 0, "rank": name, "step": 1, "reason": name})
    console = Console(file=io.StringIO(), width=200, markup=False, highlight=False, emoji=False)

    console.print(draw(snapshot))

    frame = console.file.getvalue()
    assert frame.replace("\n", "").isprintable()
    assert frame.count(r"a\x1b[2J") == 7
