import os
import pty
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.monitoring import Console, EpochMetrics, StepMetrics
from training.monitoring.console import Outcome
from training.monitoring.events import StepsAgreed

ROOT = Path(__file__).parents[3]


def _run(console: Console, step_metrics: Callable[..., StepMetrics], first_step: int, total_steps: int) -> None:
    with console.progress(total_steps=total_steps, first_step=first_step, samples_done=64 * first_step) as bar:
        for step in range(first_step + 1, total_steps + 1):
            bar.receive(StepsAgreed([step_metrics(step)]))


def _steps_shown(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/", output, flags=re.MULTILINE)]


def test_plain_mode_prints_no_control_characters(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    step_metrics: Callable[..., StepMetrics],
    epoch_metrics: Callable[..., EpochMetrics],
    evaluation: Callable[..., dict[str, Any]],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console()
    console.banner({"World size": "2 (gloo)"})
    _run(console, step_metrics, 0, 30)
    console.epoch_table([epoch_metrics(1, 30)])
    _finish(console, evaluation())
    output = capsys.readouterr().out
    assert not [letter for letter in output if letter != "\n" and unicodedata.category(letter) == "Cc"]


def test_plain_mode_shows_the_first_step_each_tenth_and_the_last(
    capsys: pytest.CaptureFixture[str], step_metrics: Callable[..., StepMetrics]
) -> None:
    _run(Console(), step_metrics, 0, 300)
    assert _steps_shown(capsys.readouterr().out) == [1, *range(30, 301, 30)]


def test_plain_mode_of_a_resumed_run_continues_the_count(
    capsys: pytest.CaptureFixture[str], step_metrics: Callable[..., StepMetrics]
) -> None:
    _run(Console(), step_metrics, 150, 300)
    output = capsys.readouterr().out
    assert "Resuming after step 150 of 300 (9,600 samples seen)" in output
    assert _steps_shown(output) == [151, 180, 210, 240, 270, 300]


def test_plain_mode_shows_where_a_run_stopped_short(
    capsys: pytest.CaptureFixture[str], step_metrics: Callable[..., StepMetrics]
) -> None:
    with Console().progress(total_steps=1000, first_step=0, samples_done=0) as bar:
        for step in (1, 2, 37):
            bar.receive(StepsAgreed([step_metrics(step)]))
    assert _steps_shown(capsys.readouterr().out) == [1, 37]


def test_only_the_last_of_the_improving_epochs_is_marked_best(
    capsys: pytest.CaptureFixture[str], epoch_metrics: Callable[..., EpochMetrics]
) -> None:
    Console().epoch_table([epoch_metrics(1, 10), epoch_metrics(2, 20), epoch_metrics(3, 30, is_best=False)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "best" in line] == ["2"]


def test_the_table_of_epochs_at_the_end_is_printed_only_if_it_has_epochs_not_shown_yet(
    capsys: pytest.CaptureFixture[str], epoch_metrics: Callable[..., EpochMetrics]
) -> None:
    before_a_resume, here = epoch_metrics(1, 10), epoch_metrics(2, 20)
    console = Console()
    console.epoch_table([here])
    capsys.readouterr()

    console.rest_of_epochs([here])
    assert capsys.readouterr().out == ""

    console.rest_of_epochs([before_a_resume, here])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["epoch", "1", "2"]


def test_the_rows_of_a_run_stand_below_one_heading_and_fit_80_columns(
    capsys: pytest.CaptureFixture[str], epoch_metrics: Callable[..., EpochMetrics]
) -> None:
    console = Console()
    for epoch in (0, 1, 2.5, 12):
        trained = {"train_loss": 10.0 + epoch, "seconds": 1000.0 * epoch}
        # Nothing was trained before the first epoch, in which a head was fitted.
        trained["train_accuracy"] = epoch / 12 if epoch else None
        console.epoch_table([replace(epoch_metrics(epoch, 10, is_best=epoch > 1), **trained)])

    heading, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["0", "1", "2.5", "12"]
    assert max(map(len, rows)) <= 80
    # Every value ends below the end of its title.
    for title in ("epoch", "train loss", "val loss", "macro F1", "time"):
        end = heading.index(title) + len(title)
        assert all(row[end - 1] != " " and row[end : end + 1] in ("", " ") for row in rows), title
    end = heading.index("accuracy") + len("accuracy")
    assert [row[end - 6 : end].strip() for row in rows] == ["", "8.33%", "20.83%", "00.00%"]


def test_the_time_left_is_estimated_without_the_first_step(
    capsys: pytest.CaptureFixture[str], step_metrics: Callable[..., StepMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0  # the first step takes 100 s, the others one
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Console().progress(total_steps=100) as bar:
        for step in range(1, 11):
            bar.receive(StepsAgreed([step_metrics(step)]))
            now += 1.0
    first, last = capsys.readouterr().out.splitlines()

    assert "ETA" not in first
    assert last.endswith("ETA 1m 30s")


def test_the_end_of_a_run_names_the_next_command(
    capsys: pytest.CaptureFixture[str], evaluation: Callable[..., dict[str, Any]]
) -> None:
    _finish(Console(), evaluation(), Path("my model"))
    assert "python -m inference.export 'my model'" in capsys.readouterr().out


def test_a_long_path_stays_on_one_line(
    capsys: pytest.CaptureFixture[str], evaluation: Callable[..., dict[str, Any]]
) -> None:
    folder = Path("/", *["a-long-folder-name"] * 12)
    _finish(Console(), evaluation(), folder)
    output = capsys.readouterr().out
    assert f"{folder}\n" in output
    assert "90.00% on 200 rows (95% interval 85.06% to 93.43%)" in output


def test_text_in_brackets_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Console().say("label [red] of [/x] :smile:")
    assert capsys.readouterr().out == "label [red] of [/x] :smile:\n"


def test_a_terminal_shows_one_live_bar_with_the_figures() -> None:
    program = """
from training.monitoring import Console, StepMetrics
from training.monitoring.events import StepsAgreed
console = Console()
with console.progress(total_steps=300, first_step=120, samples_done=7680) as bar:
    bar.receive(StepsAgreed([StepMetrics(169, 2, 0.5, 1.9e-5, 1.0, 118.2, 15443.0, 84.0)]))
    bar.receive(StepsAgreed([StepMetrics(170, 2, 0.4321, 1.9e-5, 1.0, 118.2, 15443.0, 85.0)]))
    console.say("saved a checkpoint")
"""
    output = _run_in_terminal(program)
    assert "\x1b[" in output
    for figure in (
        "epoch 2",
        "170/300",
        "57%",
        "loss 0.4321",
        "118.2 samples/s",
        "15,443 tokens/s",
        "ETA",
        "saved a",
    ):
        assert figure in output


def test_a_terminal_that_only_knows_ascii_does_not_end_the_run() -> None:
    program = "from training.monitoring import Console; Console().say('2 \\u00d7 32')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout == b"2 ? 32\n"


def test_importing_monitoring_imports_nothing_heavy() -> None:
    program = "import sys, training.monitoring; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    assert not {"matplotlib", "tensorboard", "jinja2", "torch", "numpy"} & set(done.stdout.split())


def _finish(console: Console, test: dict[str, Any], folder: Path = Path("model")) -> None:
    outcome = Outcome(
        seconds=160.0,
        best_epoch=2,
        validation={"accuracy": 0.91},
        test=test,
        model_folder=folder,
        checkpoint_file=Path("model.pt"),
        report=Path("model.run/report.html"),
    )
    console.finish(outcome)


def _run_in_terminal(program: str) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output = b""
    # Reading fails once the program has closed its side.
    try:
        while piece := os.read(ours, 4096):
            output += piece
    except OSError:
        pass
    os.close(ours)
    assert process.wait() == 0, output
    return re.sub(r"\x1b\[[0-9;]*m", "", output.decode())


def test_labels_and_paths_cannot_command_the_terminal(
    capsys: pytest.CaptureFixture[str], evaluation: Callable[..., dict[str, Any]]
) -> None:
    console, name = Console(), "a\x1b]0;b\x07\r\n\x9bc"
    console.say(name)
    console.banner({"Data": name})
    console.table("Operators", ["name"], [[name]])
    _finish(console, evaluation(), Path(name))
    output = capsys.readouterr().out
    assert output.count(r"a\x1b]0;b\x07\r\n\x9bc") >= 4
    assert output.replace("\n", "").isprintable()
