"""The lessons' pages: their scripts and commands are run as they stand there, and print what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from learn.lessons import LESSONS
from tests.deployment.documented import blocks, documented
from tests.docs.pages import REPOSITORY, blocks_of_python, scripts, shown_after
from tests.docs.test_commands import Run, is_excerpt, run  # noqa: F401 - a fixture

EXERCISE = "exercise"
# The functions that a page trains with are the learner's own, so the truth stands in for them.
SOLUTIONS = {"data_parallel": REPOSITORY / "learn" / "by_hand" / "data_parallel.py"}


def page_of(lesson: str) -> str:
    return f"docs/lessons/{lesson}.md"


COMMANDS = [
    (lesson, block.name)
    for lesson in LESSONS
    for block in blocks(page_of(lesson))
    if block.name and block.name != EXERCISE
]


@pytest.mark.slow
@pytest.mark.parametrize(("lesson", "name"), COMMANDS)
def test_a_command_of_a_lesson_prints_what_the_page_shows(lesson: str, name: str, run: Run, tmp_path: Path) -> None:  # noqa: F811
    for script, code in scripts(page_of(lesson)).items():
        (tmp_path / script).write_text(code)
    if lesson in SOLUTIONS:
        (tmp_path / "my_solution.py").write_text(SOLUTIONS[lesson].read_text())
    commands = documented(page_of(lesson), name)

    result = run(commands)

    assert result.returncode == (1 if "learn.check" in commands else 0), result.stdout
    assert is_excerpt(shown_after(page_of(lesson), commands), result.stdout), result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_an_exercise_as_it_is_copied_has_everything_left_to_do(lesson: str, run: Run) -> None:  # noqa: F811
    result = run(documented(page_of(lesson), EXERCISE))

    assert result.returncode == 1
    assert "to do  " in result.stdout
    assert "\n0 of " in result.stdout


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_shows_a_short_script_a_wrong_solution_and_folded_answers(lesson: str) -> None:
    code = [block.code for block in blocks_of_python(page_of(lesson)) if block.script]
    checked = [
        name for found, name in COMMANDS if found == lesson and "learn.check" in documented(page_of(found), name)
    ]

    assert code
    assert len(code) == (REPOSITORY / page_of(lesson)).read_text().count("```python")
    assert all(5 <= len(one.splitlines()) <= 45 for one in code)
    assert len(checked) == 1
    assert '<details markdown="1">' in (REPOSITORY / page_of(lesson)).read_text()
