"""The checkers of the lessons: the truth passes, and each wrong solution is told what is wrong with it."""

import io
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from common.errors import TrainingFailure, run_command
from learn import check, ranks
from learn.by_hand import data_parallel, ring_all_reduce, zero1
from learn.check import describe, hanging
from learn.checking.exercises import EXERCISES, functions_of
from learn.checking.finding import ENDLESS_HINT, Finding
from learn.checking.rank import Report
from learn.checking.solution import load_function
from learn.checking.verdict import SECONDS, Verdict, check_function, explain
from learn.lessons import LESSONS
from tests.docs.pages import REPOSITORY
from tests.learn.lessons.wrong_solutions import wrong_solutions

HERE = Path(__file__).parent
TRUTH = Path(data_parallel.__file__)
TRUTHS = {
    "ring": Path(ring_all_reduce.__file__),
    "data_parallel": TRUTH,
    "rows": HERE / "right" / "rows" / "dealt_like_cards.py",
    "buckets": HERE / "right" / "buckets" / "counted_down.py",
    "zero1": Path(zero1.__file__),
    "tensor_parallel": HERE / "right" / "tensor_parallel" / "from_by_hand.py",
    "pipeline": HERE / "right" / "pipeline" / "from_by_hand.py",
}
HANG_SECONDS = 5.0
DEADLINE = 60.0  # seconds
# The others take half a minute together.
FAST = ("ring_stops_half_way", "gradients_divided_by_two")
# Not on ranks that are used again: a call that fails or hangs on some of them leaves the others in
# a collective, and without a late rank 0, a collective that nobody waits for may finish in time.
ONLY_IN_A_CHECK = (
    *("hangs", "do not match", "raised", "Error", "Variable", "NoneType", "ended during", "wait()"),
    *("no function", "it takes"),
)
# Lessons in which each mistake has the same name on any number of ranks.
LISTED = ("zero1", "tensor_parallel", "pipeline")
RIGHT = [
    (path, name)
    for lesson in LESSONS
    for path in sorted((HERE / "right" / lesson).glob("*.py"))
    for name in functions_of(lesson)
]
WRONG = wrong_solutions()
Judge = Callable[[dict[str, tuple[Path, str]], int], dict[str, str]]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in WRONG])
def test_a_wrong_solution_is_told_what_is_wrong(name: str, tmp_path: Path) -> None:
    function, says, source = WRONG[name]
    path = tmp_path / f"{name}.py"
    path.write_text(source)

    verdict = check_function(path, function, (2, 3), seconds=HANG_SECONDS if "hangs" in says else SECONDS)

    assert verdict.finding is not None
    shown = describe(verdict, EXERCISES[function].promise).plain
    assert all(words in shown for words in says), shown


def _call(path: Path, function: str) -> Report:
    value = EXERCISES[function].observe(load_function(path, function))
    dist.barrier()
    return Report("returned", value)


def _call_all(cases: list[tuple[Path, str]]) -> list[Report]:
    return [_call(*case) for case in cases]


@pytest.fixture
def judge(run_on_ranks: Callable[..., list[Any]]) -> Judge:
    """What is said of functions, called in turn on the same few ranks; of a right one, nothing."""

    def judge(cases: dict[str, tuple[Path, str]], world_size: int) -> dict[str, str]:
        by_rank = run_on_ranks(world_size, _call_all, list(cases.values()))
        shown = {}
        for (name, (_, function)), reports in zip(cases.items(), zip(*by_rank, strict=True), strict=True):
            verdict = Verdict(function, explain(function, reports, SECONDS), world_size, {})
            shown[name] = describe(verdict, EXERCISES[function].promise).plain if verdict.finding else ""
        return shown

    return judge


@pytest.fixture
def wrong(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    cases = {}
    for name, (function, says, source) in WRONG.items():
        if not any(words in " ".join(says) for words in ONLY_IN_A_CHECK):
            cases[name] = tmp_path / f"{name}.py", function
            cases[name][0].write_text(source)
    assert len(cases) > 180
    return cases


def _untold(shown: dict[str, str]) -> str:
    return "\n".join(
        f"{name}: {text}" for name, text in shown.items() if not all(says in text for says in WRONG[name][1])
    )


def test_each_mistake_is_named_on_two_ranks_or_else_on_three(wrong: dict[str, tuple[Path, str]], judge: Judge) -> None:
    shown = judge(wrong, 2)
    shown |= judge({name: wrong[name] for name, text in shown.items() if not text}, 3)

    assert not _untold(shown)


@pytest.mark.slow
def test_a_mistake_has_the_same_name_on_three_ranks(wrong: dict[str, tuple[Path, str]], judge: Judge) -> None:
    assert not _untold(judge({name: case for name, case in wrong.items() if EXERCISES[case[1]].lesson in LISTED}, 3))


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_truth_passes_on_two_and_three_ranks(world_size: int, judge: Judge) -> None:
    cases = {name: (TRUTHS[exercise.lesson], name) for name, exercise in EXERCISES.items()}

    assert not "".join(judge(cases, world_size).values())


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name"), RIGHT, ids=lambda value: getattr(value, "stem", value))
def test_another_right_solution_is_not_called_wrong(path: Path, name: str) -> None:
    assert check_function(path, name, (2, 3, 5)).finding is None


@pytest.mark.parametrize("lesson", [LESSONS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in LESSONS[1:])])
def test_an_exercise_that_nobody_has_begun_is_to_do(
    lesson: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _check_here(monkeypatch, lesson, REPOSITORY / "learn" / "lessons" / f"{lesson}.py")

    out, err = capsys.readouterr()
    assert (code, err) == (1, "")
    assert [line.split(": ")[0] for line in out.splitlines() if "to do" in line] == [
        f"to do  {name}" for name in functions_of(lesson)
    ]
    assert out.endswith(f"0 of {len(functions_of(lesson))} right\n")


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (None, [], "cannot be read (No such file or directory); copy the lesson's file in learn/lessons"),
        ("import torch\ndef average_gradients(model:\n", [], "line 2: '(' was never closed"),
        ("x = 'no\0 text'\n", [], "my_solution.py: source code string cannot contain null bytes"),
        ("", ["--workers", "1"], "--workers 1: must be 2 to 8"),
        ("", ["--workers", "9"], "--workers 9: must be 2 to 8"),
        ("", ["--worker", "2"], "unrecognized arguments: --worker 2 (see --help)"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(
    text: str | None,
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "my_solution.py"
    if text is not None:
        path.write_text(text)

    code = _check_here(monkeypatch, "data_parallel", path, *flags)

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_ranks_that_do_not_meet_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "environment", _on_no_network(ranks.environment))

    with pytest.raises(TrainingFailure, match=r"^rank \d of 2 did not start; .*none0"):
        check_function(TRUTH, "global_accuracy", (2,))


def _on_no_network(environment: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    return lambda *place: environment(*place) | {"GLOO_SOCKET_IFNAME": "none0"}


def test_a_check_shows_for_whom_it_waits_and_what_is_no_waiting(tmp_path: Path) -> None:
    path, shown = tmp_path / "endless.py", []
    path.write_text(WRONG["gradients_in_an_endless_loop"][2])

    verdict = check_function(path, "average_gradients", (2,), seconds=1.5, show=shown.append)

    assert shown[0].startswith("waiting for ranks 0, 1 (")
    assert verdict.finding is not None
    assert verdict.finding.hint == ENDLESS_HINT


def test_in_a_terminal_a_verdict_breaks_between_words_and_keeps_its_indent() -> None:
    finding = Finding("forgot to divide", "What makes it a mean, and over how many?", "rank 0: [1.0, 2.0]")
    console = Console(width=40, force_terminal=True, color_system=None, file=io.StringIO())

    for line in describe(Verdict("average_gradients", finding, 2, {}), "").split():
        console.print(hanging(line, console))

    # Some versions of rich keep the space at which they break a line.
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "wrong  average_gradients, on 2 ranks:",
        "       forgot to divide",
        "       rank 0: [1.0, 2.0]",
        "       hint: What makes it a mean, and",
        "       over how many?",
    ]


def test_a_file_of_another_name_with_a_module_beside_it_is_checked(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from learn.by_hand.data_parallel import *\n")
    (tmp_path / "no suffix, é").write_text("from beside import global_accuracy\n")

    assert check_function(tmp_path / "no suffix, é", "global_accuracy", (2,)).finding is None


@pytest.mark.slow
def test_the_command_passes_the_truth_by_path_and_as_a_module(start: Callable[..., "Run"]) -> None:  # noqa: F821
    commands = [[check.__file__], ["-m", "learn.check"]]

    runs = [start([sys.executable, *command, "data_parallel", TRUTH, "--workers", "2"]) for command in commands]

    for run in runs:
        assert run.process.returncode == 0, run.err
        assert run.err == ""
        assert run.out.count("right  ") == 3
        assert "3 of 3 right" in run.out


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_no_rank_outlives_the_command(
    ending: signal.Signals,
    code: int,
    start: Callable[..., "Run"],  # noqa: F821
    tmp_path: Path,
) -> None:
    solution = tmp_path / "endless.py"
    solution.write_text(
        "import os, pathlib\n"
        "def broadcast_parameters(model):\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.rank').touch()\n"
        "    while True: pass\n"
    )
    run = start([sys.executable, "-m", "learn.check", "data_parallel", solution], wait=False)
    run.wait_until(lambda: len(list(tmp_path.glob("*.rank"))) == 2)
    pids = [int(path.stem) for path in tmp_path.glob("*.rank")]

    os.kill(run.process.pid, ending)

    assert run.wait() == code
    assert run.err == ("interrupted\n" if ending == signal.SIGINT else "")
    for pid in pids:
        _wait_until_gone(pid)


def _check_here(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run_command(check.main)
    return int(ended.value.code or 0)


def _wait_until_gone(pid: int) -> None:
    """Returns once a process has ended."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        ended, _, _ = select.select([descriptor], [], [], DEADLINE)
        os.close(descriptor)
        assert ended, f"process {pid} still runs after {DEADLINE:.0f} s"
