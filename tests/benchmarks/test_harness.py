"""What all benchmarks share: rounds, their arithmetic, pages, ranks and studies."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, studies
from benchmarks.processes import Layout, run_ranks
from benchmarks.studies import Figures, Study, Trial
from common.errors import TrainingFailure, UserError
from tests.benchmarks.rank_functions import fail_on_rank_1, which_rank
from training.data.dataset import load_data


def test_two_cases_swap_places_and_three_go_through_all_orders() -> None:
    assert [harness.in_turns("ab", number) for number in range(4)] == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]
    assert {tuple(harness.in_turns("abc", number)) for number in range(6)} == set(permutations("abc"))


@pytest.mark.parametrize("count", range(9))
def test_every_round_has_every_case_once(count: int) -> None:
    cases = list(range(count))
    assert all(sorted(harness.in_turns(cases, number)) == cases for number in range(20))


def test_rounds_alternate_and_their_results_keep_the_order_of_the_cases() -> None:
    measured: list[str] = []

    def measure(case: str, number: int) -> str:
        measured.append(f"{case}{number}")
        return case.upper()

    rounds = list(harness.run_rounds({"x": "a", "y": "b"}, 2, measure, str))

    assert measured == ["a0", "b0", "b1", "a1"]
    assert [list(found.items()) for found in rounds] == [[("x", "A"), ("y", "B")]] * 2


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    ours, theirs = [10.0, 100.0, 30.0], [10.0, 50.0, 10.0]
    assert harness.median_ratio(ours, theirs) == 2.0  # of 1, 2 and 3; the ratio of the medians is 3
    with pytest.raises(ValueError, match="zip"):
        harness.median_ratio(ours, theirs[:2])


def test_a_spread_names_the_smallest_and_the_largest() -> None:
    assert harness.median_and_spread([3.0, 1.0, 1234.5]) == "3.0 (1.0 to 1,234.5)"
    assert harness.median_and_spread([1234.5]) == "1,234.5"


def test_a_table_has_a_row_per_case_and_a_cell_per_column() -> None:
    columns = {"case": str, "twice": lambda case: str(2 * case)}
    assert harness.table(columns, [1, 2]) == "| case | twice |\n| --- | ---: |\n| 1 | 2 |\n| 2 | 4 |\n"


def test_results_are_written_with_a_line_per_row() -> None:
    results = {
        "facts": {"Measured": "today"},
        "results": {"cut": [{"texts": [1, 2]}, {"texts": []}], "whole": {}},
        "words": [1.5, None],
    }
    written = harness.row_per_line(results)
    assert json.loads(written) == results
    assert written.splitlines() == [
        "{",
        ' "facts": {"Measured": "today"},',
        ' "results": {',
        '  "cut": [',
        '   {"texts": [1, 2]},',
        '   {"texts": []}',
        "  ],",
        '  "whole": {}',
        " },",
        ' "words": [1.5, null]',
        "}",
    ]


def test_a_page_is_written_with_its_results_and_one_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    harness.write_page(tmp_path / "new" / "page.md", "# Page\n", {"rounds": [1]})

    assert (tmp_path / "new" / "page.md").read_text() == "# Page\n"
    assert harness.read_results(tmp_path / "new" / "page.json") == {"rounds": [1]}
    assert harness.read_results(tmp_path / "none.json") == {}
    with pytest.raises(UserError, match="cannot be written"):
        harness.write_page(tmp_path / "new" / "page.md" / "page.md", "# Page\n")
    (tmp_path / "torn.json").write_text(json.dumps({"rounds": [1]})[:-3])
    with pytest.raises(UserError, match="not valid JSON"):
        harness.read_results(tmp_path / "torn.json")


def test_a_part_that_is_not_measured_again_keeps_what_the_page_has_of_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    def measure(options: Namespace) -> Iterator[dict[str, Any]]:
        yield {"value": 1}
        yield {"value": 2}

    def run(*parts: str) -> list[list[str]]:
        written: list[dict[str, Any]] = []

        def write(results: dict[str, Any]) -> None:
            written.append(results)
            harness.write_page(page, "", results)

        cases = {"first": measure, "second": measure}
        harness.measure_parts(Namespace(output=page, parts=parts), cases, "benchmarks.some", (), write)
        return [list(results) for results in written]

    assert run("second") == [["second"]] * 2
    kept = harness.read_results(page.with_suffix(".json"))["second"]
    assert run("first") == [["first", "second"]] * 2  # in the order of the page
    results = harness.read_results(page.with_suffix(".json"))
    assert results["second"] == kept
    assert results["first"]["value"] == 2
    assert "Machine" in results["first"]["facts"]


def test_the_recorded_command_leaves_out_folders_and_flags_of_other_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["x.py", "--model", "/home/me/model", "--rounds", "3", "--", "--isolation", "chroot"]
    )
    facts = harness.measurement_facts("benchmarks.x", ["torch", "no-such-package"])
    assert facts["Command"] == "`python -m benchmarks.x --model .../model --rounds 3`"
    assert facts["Versions"].endswith(", no-such-package not installed")


@pytest.mark.parametrize("text", ["2", "0x1", "1x", "twoxone", "1x4096"])
def test_a_layout_that_this_machine_cannot_run_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match=f"--layouts {text}"):
        Layout.parse(text)


def test_ranks_return_their_results_in_order_and_a_failure_names_the_rank() -> None:
    assert run_ranks(which_rank, Layout(2, 1), word="rank") == ["rank 0 of 2", "rank 1 of 2"]
    with pytest.raises(
        TrainingFailure, match=r"fail_on_rank_1: rank 1 ended with code 1 \(ValueError: this rank fails"
    ):
        run_ranks(fail_on_rank_1, Layout(2, 1))


def measure(trial: Trial) -> Figures:
    """Half of what the seed says, or a quarter without flags."""
    rows = trial.write_rows(train=trial.data.train, test=trial.data.test)
    assert load_data(str(rows)).test.texts == trial.data.test.texts
    trial.output.mkdir()
    return {"accuracy": trial.seed / 2 if trial.flags else 0.25, "seconds": 3.0, "place": str(trial.output)}


def test_every_variant_is_measured_with_every_seed_and_its_model_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(
        "some",
        "What for?",
        "Some study",
        "{rows} of the {tests} rows of {name}, {seeds} seeds, {why}.",
        variants=lambda options: {"plain": (), "long": ("--long", options.long)},
        measure=measure,
        flags={"dataset": studies.dataset(), "rows": studies.number(7, "rows"), "long": {"default": "cut"}},
        words=lambda run: {"why": "for fun"},
        columns={"variant": studies.row_name, "%": studies.mean_percent("accuracy"), "s": studies.median_seconds},
    )
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["some", "--dataset", "sample", "--seeds", "2", "--output", str(page)])

    study.main()

    run = harness.read_results(page.with_suffix(".json"))
    assert [list(found) for found in run["rounds"]] == [["plain", "long"]] * 2
    assert not any(Path(figures["place"]).exists() for found in run["rounds"] for figures in found.values())
    text = page.read_text()
    assert text == study.page(run)
    assert "`python -m benchmarks.some`.\n7 of the 432 rows of sample, 2 seeds, for fun.\n" in text
    assert "| plain | 25.0 (25.0 to 25.0) | 3 (3 to 3) |\n| long | 25.0 (0.0 to 50.0) | 3 (3 to 3) |\n" in text
