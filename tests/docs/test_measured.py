"""Figures of the README rest on pages that were measured in enough rounds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from common.errors import UserError
from tests.docs.pages import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
FEWEST_ROUNDS = 5
MOST_COMMITS = 200  # that may have changed what a cited page measured


def cited_pages() -> list[str]:
    """The measured pages that the README takes figures from."""
    found = re.findall(r"\]\(benchmarks/(\w+)\.md\)", (REPOSITORY / "README.md").read_text())
    return sorted(set(found) - {"README"})  # the list of all figures


def rounds_of(name: str) -> int:
    """Rounds behind the figures of a page: of its JSON, the section with the fewest; without JSON, as the page says."""
    results = BENCHMARKS / f"{name}.json"
    if results.exists():
        return min(_rounds_in(json.loads(results.read_text())), default=0)
    said = re.search(
        r"(?:the median of\s|Runs:[^\n]*?\b)(\d+) (?:starts|rounds)", (BENCHMARKS / f"{name}.md").read_text()
    )
    return int(said[1]) if said else 1


def _rounds_in(results: Any) -> list[int]:
    if isinstance(results, list):
        return [count for part in results for count in _rounds_in(part)]
    if not isinstance(results, dict):
        return []
    own = [len(results[key]) for key in ("rounds", "seconds") if isinstance(results.get(key), list)]
    return own or [count for part in results.values() for count in _rounds_in(part)]


def test_the_readme_takes_figures_from_measured_pages() -> None:
    assert {"serving", "training_throughput", "image"} <= set(cited_pages())


@pytest.mark.parametrize("name", cited_pages())
def test_a_figure_in_the_readme_rests_on_five_rounds_or_more(name: str) -> None:
    assert rounds_of(name) >= FEWEST_ROUNDS


@pytest.mark.parametrize("name", cited_pages())
def test_a_page_that_the_readme_cites_is_as_new_as_what_it_measures(name: str) -> None:
    measured = measure.facts_of((BENCHMARKS / f"{name}.md").read_text(), "Measured")
    ages = [measure.commits_since(one, measure.FIGURES[name].code) for one in measured]
    known = [age for age in ages if age is not None]
    if not known:
        pytest.skip("git does not know the page's commit: a copy without its history")
    # The newest counts: a section about another processor can only be measured again on such a one.
    assert min(known) <= MOST_COMMITS, "measure it again, with the command on the page"


def test_the_list_of_figures_is_that_of_the_pages() -> None:
    def lines(page: str) -> list[str]:
        # Without the last column, the commits since, which each commit changes.
        return [line.rpartition(" | ")[0] if line.startswith("|") else line for line in page.splitlines()]

    assert lines((BENCHMARKS / "README.md").read_text()) == lines(measure.render(BENCHMARKS))


def test_every_measured_page_has_its_figure_in_the_list() -> None:
    pages = {path.stem for path in BENCHMARKS.glob("*.md") if measure.facts_of(path.read_text(), "Measured")}
    assert pages == set(measure.FIGURES)


@pytest.mark.parametrize("name", cited_pages())
def test_the_readmes_figures_are_those_of_their_pages(name: str) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    row = re.search(
        rf"^\|[^|\n]*\| ([^|\n]*) \| ([^|\n]*) \| \[[^|\n]*\]\(benchmarks/{name}\.md\) \|$", readme, re.MULTILINE
    )
    assert row, f"no row of the README's table is about {name}"
    page, figure = (BENCHMARKS / f"{name}.md").read_text(), measure.FIGURES[name]
    assert row[1] == measure.figure_of(page, figure)
    counting = measure.counting(page, figure)
    newest: dict[str, str] = {}  # day of each processor
    for machine, when in zip(*(measure.facts_of(counting, fact) for fact in ("Machine", "Measured")), strict=True):
        processor = machine.partition(",")[0]
        newest[processor] = max(newest.get(processor, ""), when[:10])
    said = dict(one.split(", ") for one in row[2].split("; "))
    assert sorted(said.values()) == sorted(newest.values())
    for name, day in said.items():
        assert [newest[processor] for processor in newest if name in processor] == [day]


def test_what_cannot_be_measured_is_named_and_does_not_keep_the_others_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none"
    words = ["--only", "image", "bulk_scoring", "--model", missing, "--wide", tmp_path, "--data", tmp_path]
    with pytest.raises(UserError, match="2 of 2 pages were not measured: image, bulk_scoring"):
        measure.measure(measure.make_parser().parse_args(map(str, words)))
    assert f"image was not measured: --model {missing}: not found." in capsys.readouterr().out


def test_a_figure_of_several_machines_is_a_range_without_its_spread() -> None:
    page = "| **ours** | 2 x 1 | 2.5 (2 to 3) | 9 |\n| **ours** | 2 x 1 | 12.1 | 9 |\n| theirs | 2 x 1 | 1.0 | 9 |\n"
    figure = measure.Figure("speed", r"\*\*ours\*\* . 2 x 1", 0, ("training",))
    assert measure.figure_of(page, figure) == "2.5 to 12.1"
    with_another_task = f"## Small\n{page}## Small, another task\n| **ours** | 2 x 1 | 99 | 9 |\n"
    assert measure.figure_of(with_another_task, figure) == "2.5 to 99"
    assert measure.figure_of(with_another_task, figure._replace(sections="Small")) == "2.5 to 12.1"
