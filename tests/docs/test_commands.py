"""The learning pages' commands, run as they stand there; what is shown behind them is what they print."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.rows import Columns, Reading, read_file
from tests.deployment.documented import documented
from tests.docs.pages import REPOSITORY, blocks_of_python, inline_commands, shown_after
from training.config import parse_config

GUIDE = "docs/DISTRIBUTED_TRAINING_GUIDE.md"
CARDS = "docs/CARDS.md"
STRATEGIES = "docs/PARALLELISM_STRATEGIES.md"
REFERENCE = "docs/QUICK_REFERENCE.md"
FRAMEWORKS = "docs/FRAMEWORKS.md"
PRINTED = (
    *("plan-small", "plan-eight", "variables", "collectives", "ring", "by-hand", "against-ddp", "faults"),
    *("buckets", "pipeline", "resume"),
)
FAILS = {"faults": 1}  # what is wrong
TRAINED = {
    "zero3": documented(GUIDE, "zero3"),
    "3d": documented(GUIDE, "mesh"),
    "compressed": documented(GUIDE, "compress"),
    "watched": documented(GUIDE, "watch"),
}
# What each processor rounds in its own way: rounding errors, and what comes of training.
ROUNDED = re.compile(r"\d\.\de[+-]\d\d")
ROUNDED_IN_TRAINING = re.compile(rf"{ROUNDED.pattern}|\d+\.\d+%?")

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(commands)`: in a place that looks like the repository, but whose checkpoints are the test's own."""
    for name in ("training", "inference", "learn", "common"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    told = {"PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "140"}

    def run(commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=tmp_path,
            env={**os.environ, **told},
            text=True,
            timeout=400,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return run


def is_excerpt(shown: str, printed: str) -> bool:
    """Whether a text is all that was printed, but for what a `…` stands for: some lines, or a part of one.

    Rounding errors, such as 1.2e-08, may be smaller than shown, or up to ten times as large. On lines with a loss or an
    accuracy, percentages may differ by 3 points, and other decimals by 5% and 0.01: more than what another
    processor's rounding makes of a short run.
    """
    lines = [r"(?:.*\n)*" if line == "…" else _pattern(line) for line in shown.splitlines()]
    found = re.fullmatch("".join(lines), "".join(f"{line.rstrip()}\n" for line in printed.strip().splitlines()))
    if found is None:
        return False
    told = [number for line in shown.splitlines() for number in _rounded(line).findall(line)]
    return all(_is_near(*pair) for pair in zip(found.groups(), told, strict=True))


def _rounded(line: str) -> re.Pattern[str]:
    return ROUNDED_IN_TRAINING if re.search("loss|accuracy", line) else ROUNDED


def _is_near(got: str, told: str) -> bool:
    if "e" in told:
        return float(got) <= 10 * float(told)
    if told.endswith("%"):
        return abs(float(got[:-1]) - float(told[:-1])) <= 3
    return abs(float(got) - float(told)) <= 0.05 * float(told) + 0.01


def _pattern(line: str) -> str:
    rounded = _rounded(line)
    pattern, end = "", 0
    for number in rounded.finditer(line):
        kind = ROUNDED.pattern if "e" in number[0] else r"\d+\.\d+" + "%" * number[0].endswith("%")
        pattern += _exactly(line[end : number.start()]) + f"({kind})"
        end = number.end()
    return pattern + _exactly(line[end:]) + r"\n"


def _exactly(part: str) -> str:
    return ".*".join(map(re.escape, part.split("…")))


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("loss 13.464, accuracy 99.2%", "loss 13.466, accuracy 97.7%", True),
        ("accuracy …: 99.2%", "accuracy of rank 0: 97.7%", True),
        ("accuracy 99.2%", "accuracy 53.1%", False),
        ("step 8: loss 0.703", "step 8: loss 0.803", False),
        ("step 8: loss 0.703", "step 9: loss 0.703", False),
        ("memory 1.5 GB, 94.0%", "memory 1.5 GB, 93.9%", False),
        ("difference 1.2e-08", "difference 9.9e-08", True),
        ("difference 1.2e-08", "difference 3.0e-07", False),
    ],
)
def test_only_what_a_processor_rounds_in_its_own_way_may_differ(shown: str, printed: str, expected: bool) -> None:
    assert is_excerpt(shown, printed) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_a_command_of_the_guide_prints_what_the_guide_shows(name: str, run: Run) -> None:
    commands = documented(GUIDE, name)
    result = run(commands)

    assert result.returncode == FAILS.get(name, 0), result.stdout
    assert is_excerpt(shown_after(GUIDE, commands), result.stdout), result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_of_the_guide_prints_what_it_shows_and_leaves_a_model(name: str, run: Run, tmp_path: Path) -> None:
    result = run(TRAINED[name])

    assert result.returncode == 0, result.stdout
    assert is_excerpt(shown_after(GUIDE, TRAINED[name]), result.stdout), result.stdout
    assert (tmp_path / "checkpoints" / name / "model.safetensors").exists()
    assert (tmp_path / "checkpoints" / f"{name}.run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cards-run", "own-card"])
def test_the_page_of_the_cards_runs_as_it_shows(name: str, run: Run, tmp_path: Path) -> None:
    [block] = blocks_of_python(CARDS)
    (tmp_path / "clip.py").write_text(block.code)
    commands = documented(CARDS, name)
    result = run(commands)

    assert result.returncode == 0, result.stdout
    assert is_excerpt(shown_after(CARDS, commands), result.stdout), result.stdout


@pytest.mark.slow
def test_the_exercise_as_it_is_has_everything_left_to_do(run: Run) -> None:
    result = run(documented(GUIDE, "exercise"))

    assert result.returncode == 1
    assert "0 of 3 right" in result.stdout


@pytest.mark.slow
def test_two_strategies_train_and_a_third_is_planned(run: Run, tmp_path: Path) -> None:
    result = run(documented(STRATEGIES, "strategies"))

    assert result.returncode == 0, result.stdout
    assert all((tmp_path / "checkpoints" / name / "model.safetensors").exists() for name in ("zero3", "3d"))
    assert "layouts fit" in result.stdout


@pytest.mark.slow
def test_a_schedule_is_shown_and_another_drawn(run: Run, tmp_path: Path) -> None:
    result = run(documented(STRATEGIES, "timelines"))

    assert result.returncode == 0, result.stdout
    assert "1F1B: 4 ranks, 8 micro-batches, bubble 27.3%" in result.stdout
    assert (tmp_path / "zbv.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_plan_is_written_as_json(run: Run, tmp_path: Path) -> None:
    result = run(documented("docs/PLANNING.md", "plan"))

    assert result.returncode == 0, result.stdout
    assert (tmp_path / "plan.json").exists()


def test_a_file_of_fasttext_becomes_rows_that_training_reads(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("__label__sport He won the race\n__label__trade-fair Shares fell\n")
    result = run(documented(FRAMEWORKS, "from-fasttext"))

    assert result.returncode == 0, result.stdout
    rows = [row for _, *row in read_file(tmp_path / "rows.tsv", Reading(Columns(), skip=False))]
    assert rows == [["He won the race", "sport"], ["Shares fell", "trade-fair"]]


def test_the_flags_that_replace_another_librarys_are_taken() -> None:
    rows = re.findall(r"^\| .+? \| `.+?` \| `(--.+?)` \|", (REPOSITORY / FRAMEWORKS).read_text(), re.MULTILINE)

    assert len(rows) == 5
    for flags in rows:
        assert parse_config(flags.split(), {}).dataset


@pytest.mark.slow
def test_the_checks_before_a_long_run_find_nothing_wrong_with_a_small_one(run: Run, tmp_path: Path) -> None:
    result = run(documented(REFERENCE, "before-a-long-run"))

    assert result.returncode == 0, result.stdout
    losses = [_losses(tmp_path / "checkpoints" / f"{name}.run") for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # in bf16, if the processor has it


def _losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.mark.slow
def test_the_debugging_switches_check_replicas_and_leave_traces(run: Run, tmp_path: Path) -> None:
    result = run(documented(REFERENCE, "debugging"))

    assert result.returncode == 0, result.stdout
    assert "events.jsonl" in result.stdout
    assert list((tmp_path / "checkpoints" / "debugged.run").rglob("*.json.gz")), result.stdout


@pytest.mark.parametrize("page", ["docs/index.md", "docs/QUICK_REFERENCE.md", GUIDE])
def test_what_a_page_names_as_a_command_is_there_to_be_started(page: str) -> None:
    started = inline_commands(page)

    assert len(started) > 0 or page == GUIDE
    assert [path for path in started if not path.exists()] == []
