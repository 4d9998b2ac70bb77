"""The page that compares one process with two: what it says of its rounds, and what it leaves for another machine."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import one_or_two_processes as page
from benchmarks.processes import Layout
from common.errors import UserError

ONE, TWO = "one process, one core", "two processes, one core each"


def run(seconds: float, last: float = 0.75) -> dict[str, Any]:
    return {"rows": 100, "seconds": [seconds, seconds], "accuracy": [0.5, last], "bytes": 800_000_000}


@pytest.fixture
def section() -> dict[str, Any]:
    rounds = [{ONE: run(one), TWO: run(two)} for one, two in [(10.0, 5.0), (8.0, 5.0), (20.0, 10.0)]]
    return {"facts": {"Machine": "two cores"}, "rounds": rounds}


def tables(text: str, heading: str) -> list[list[str]]:
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_says_what_its_rounds_say(section: dict[str, Any]) -> None:
    text = page.render({"cpu": section}, "figure.png")

    rows = {row[0]: row[1:] for row in tables(text, "CPUs")[:3]}
    assert rows[ONE] == ["10.0", "10.0", "5.0 to 12.5", "1.00", "800"]
    assert rows[TWO] == ["5.0", "20.0", "10.0 to 20.0", "2.00", "800"]
    assert tables(text, "CPUs")[3:] == [
        ["validation accuracy after", "epoch 1", "epoch 2"],
        [ONE, "50.00%", "75.00%"],
        [TWO, "50.00%", "75.00%"],
    ]
    assert "- Rounds: 3\n" in text


def test_gpus_have_the_same_table_which_stays_empty_until_it_is_measured(section: dict[str, Any]) -> None:
    text = page.render({"cpu": section}, "figure.png")

    assert tables(text, "GPUs") == [tables(text, "CPUs")[0]]
    assert "Empty until `make gpu-check`" in text


def test_one_machine_fills_its_table_and_leaves_the_others(tmp_path: Path, section: dict[str, Any]) -> None:
    path = tmp_path / "page.md"
    page.put(path, "cpu", section)

    page.put(path, "gpu", {"facts": {}, "rounds": [{"one process, one GPU": run(0.5)}]})

    assert set(json.loads(path.with_suffix(".json").read_text())) == {"cpu", "gpu"}
    assert "Empty until" not in path.read_text()
    assert TWO in path.read_text()
    assert path.with_suffix(".png").stat().st_size > 1000


def test_two_processes_with_a_core_each_stand_beside_one_with_one_core_and_one_with_both() -> None:
    assert set(page.ON_CPUS.values()) == {Layout(2, 1), Layout(1, 1), Layout(1, 2)}


def test_rows_are_drawn_once_and_stay_what_they_were(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    written = [["1", f"title {number}", 'with a "quote",\nand a line'] for number in range(20)]
    for name in ("train.csv", "test.csv"):
        with (source / name).open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(written)

    first, again = (page.write_data(source, tmp_path / name, 5, 50) for name in ("first", "again"))

    assert (first / "train.csv").read_bytes() == (again / "train.csv").read_bytes()
    with (first / "train.csv").open(newline="") as file:
        drawn = list(csv.reader(file))
    assert len(drawn) == 5
    assert all(row in written for row in drawn)
    with (first / "test.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 20
    with pytest.raises(UserError, match=r"train\.csv cannot be read"):
        page.write_data(tmp_path, tmp_path / "none", 5, 5)


def test_the_committed_page_is_what_its_json_says() -> None:
    committed = page.HERE / "one_or_two_processes.md"
    results = page.read_results(committed.with_suffix(".json"))

    assert committed.read_text() == page.render(results, "one_or_two_processes.png")
