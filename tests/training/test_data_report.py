"""The command that reports on data before training: what it prints, and what its exit code says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ForeseenError, UserError
from training import data_report

TEXT = "report number {} on the things that happened on day {} of the journey to the north of {}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Training rows with a duplicate and a conflict, and test rows, one of which leaks."""
    train = [(TEXT.format(i, i * 3, i * 7), "ab"[i % 2]) for i in range(30)]
    test = [(TEXT.format(f"x{i}", f"y{i}", f"z{i}"), "ab"[i % 2]) for i in range(6)]
    for split, some in (("train", [*train, train[2], (train[3][0], "a")]), ("test", [*test, train[9]])):
        (tmp_path / f"{split}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in some))
    return tmp_path


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`report(*arguments)`: run the command with the tokenizer of tiny."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr("sys.argv", ["data_report", *map(str, arguments), "--model", "tiny"])
        data_report.main()

    return run


def test_everything_is_printed_with_examples_and_written_as_json(
    rows: Path, report: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report(rows, "--json", tmp_path / "report.json")

    printed = capsys.readouterr().out
    assert "2 of 32 training rows repeat or nearly repeat the text of an earlier one (2 equal, 0 near)" in printed
    assert (
        "1 of 7 test rows repeat or nearly repeat the text of a training row, so their scores are too good" in printed
    )
    assert "1 of 39 labelled rows repeat or nearly repeat an earlier text, but with another label" in printed
    assert "not predicted: 30 different rows are too few to tell; it takes 200" in printed
    assert "train.csv line 33  a  report number 3 on the things" in printed
    assert "train.csv line 5   b  report number 3 on the things" in printed
    figures = json.loads((tmp_path / "report.json").read_text())
    assert figures["leakage"]["rows"][0]["row"] == f"{rows / 'test.csv'} line 8"


@pytest.mark.parametrize(
    ("fail_on", "message"),
    [
        ("leakage", "--fail_on leakage: 1 of 7 test rows repeat or nearly repeat the text of a training row"),
        ("conflicts,duplicates", "with another label (1 equal, 0 near); 2 of 32 training rows"),
    ],
)
def test_a_fault_that_was_asked_for_ends_in_one_line_and_code_1(
    rows: Path, report: Callable[..., None], fail_on: str, message: str
) -> None:
    with pytest.raises(ForeseenError) as failure:
        report(rows, "--fail-on", fail_on)

    assert message in failure.value.line
    assert "\n" not in failure.value.line
    assert (failure.value.exit_code, failure.value.code) == (1, "data-faults")


def test_data_without_the_fault_end_well(rows: Path, report: Callable[..., None]) -> None:
    for split in ("train", "test"):
        lines = (rows / f"{split}.csv").read_text().splitlines()
        (rows / f"{split}.csv").write_text("\n".join(lines[: 31 if split == "train" else 7]) + "\n")

    report(rows, "--fail_on", "leakage,duplicates,conflicts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fail_on", "leaks"), "argument --fail_on: 'leaks' is not one of duplicates, leakage, conflicts"),
        (("--fail_on", ","), "argument --fail_on: ',' is not one of duplicates, leakage, conflicts"),
        (
            ("--task", "masked_lm", "--fail_on", "conflicts"),
            "these rows have no labels that could contradict each other",
        ),
        (("--text_column", "title"), "no column title among text, label"),
        (("--max_length", "0"), "--max_length 0: must be at least 8"),
        (("--epochs", "3"), "unrecognized arguments: --epochs 3"),
        (("--json", "no/such/folder/x.json"), "--json no/such/folder/x.json: cannot be written"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    rows: Path, report: Callable[..., None], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        report(rows, *arguments)

    assert refusal.value.exit_code == 2


def test_texts_cannot_draw_on_the_terminal(
    rows: Path, report: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with (rows / "train.csv").open("a") as file:
        file.write("an \x1b[31m alarming [bold]text[/bold],a\n" * 2)

    report(rows)

    printed = capsys.readouterr().out
    assert "an \\x1b[31m alarming [bold]text[/bold]" in printed
    assert "\x1b" not in printed
