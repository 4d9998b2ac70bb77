"""The pages of lessons 1, 3 and 4: their programs and commands are run as they are, and print what is shown."""

import re
from pathlib import Path

import pytest

from tests.deployment.documented import documented
from tests.docs.pages import REPOSITORY, anchors, links, shown_after
from tests.docs.test_commands import Run, is_excerpt, run  # noqa: F401 - a fixture

PRINTED = {
    ("ring", "pass-around"): 0,
    ("ring", "check-first-try"): 1,
    ("rows", "who-sees-what"): 0,
    ("rows", "check-first-try"): 1,
    ("buckets", "order"): 0,
    ("buckets", "check-first-try"): 1,
}
LESSONS = sorted({lesson for lesson, _ in PRINTED})
_FILE = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def page_of(lesson: str) -> str:
    return f"docs/lessons/{lesson}.md"


def save_programs(lesson: str, folder: Path) -> list[str]:
    """Write the programs of a page to files, under the names that the page gives them."""
    programs = list(_FILE.finditer((REPOSITORY / page_of(lesson)).read_text()))
    for program in programs:
        (folder / program["name"]).write_text(program["code"])
    return [program["name"] for program in programs]


@pytest.mark.slow
@pytest.mark.parametrize(("lesson", "name"), PRINTED)
def test_a_command_of_a_lesson_prints_what_the_page_shows(lesson: str, name: str, run: Run, tmp_path: Path) -> None:  # noqa: F811
    save_programs(lesson, tmp_path)
    commands = documented(page_of(lesson), name)
    result = run(commands)

    assert result.returncode == PRINTED[lesson, name], result.stdout
    assert is_excerpt(shown_after(page_of(lesson), commands), result.stdout), result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_an_exercise_as_it_is_copied_has_everything_left_to_do(lesson: str, run: Run) -> None:  # noqa: F811
    result = run(documented(page_of(lesson), "exercise"))

    assert result.returncode == 1
    assert "to do  " in result.stdout
    assert "\n0 of " in result.stdout


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_program_of_a_lesson_has_a_name_and_at_most_45_lines(lesson: str) -> None:
    text = (REPOSITORY / page_of(lesson)).read_text()
    programs = [program["code"] for program in _FILE.finditer(text)]

    assert programs
    assert len(programs) == text.count("```python")
    assert all(len(code.splitlines()) <= 45 for code in programs)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_links_to_what_exists_and_asks_three_questions_with_folded_answers(lesson: str) -> None:
    page = page_of(lesson)

    assert [
        str(link.target)
        for link in links(page)
        if not link.target.exists() or (link.detail and link.detail not in anchors(link.target))
    ] == []
    assert (REPOSITORY / page).read_text().count('<details markdown="1"><summary>') == 3
