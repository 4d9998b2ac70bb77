"""The lessons on ZeRO-1, tensor parallelism and pipelines: their code and commands print what the pages show."""

from pathlib import Path

import pytest

from tests.deployment.documented import documented
from tests.docs.pages import anchors, blocks_of_python, code_names, links, names_in, shown_after
from tests.docs.test_commands import Run, is_excerpt, run  # noqa: F401

LESSONS = ("zero1", "tensor_parallel", "pipeline")


def _page(lesson: str) -> str:
    return f"docs/lessons/{lesson}.md"


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_links_and_names_of_a_lesson_lead_somewhere(lesson: str) -> None:
    found = links(_page(lesson))

    assert len(found) >= 3
    assert [link.target for link in found if not link.target.exists()] == []
    assert [link.detail for link in found if link.detail and link.detail not in anchors(link.target)] == []
    assert [name.detail for name in code_names(_page(lesson)) if name.detail not in names_in(name.target)] == []


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_the_code_of_a_lesson_prints_what_the_page_shows(
    lesson: str,
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    code, _ = blocks_of_python(_page(lesson))[0]
    (tmp_path / f"{lesson}_idea.py").write_text(code)
    commands = documented(_page(lesson), "idea")

    result = run(commands)

    assert result.returncode == 0, result.stdout
    assert is_excerpt(shown_after(_page(lesson), commands), result.stdout), result.stdout
    assert 10 <= len(code.splitlines()) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_the_exercise_of_a_lesson_begins_with_nothing_right(
    lesson: str,
    run: Run,  # noqa: F811
) -> None:
    result = run(documented(_page(lesson), "exercise"))

    assert result.returncode == 1, result.stdout
    assert "0 of " in result.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_the_checker_says_to_a_wrong_solution_what_the_page_shows(
    lesson: str,
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    commands = documented(_page(lesson), "wrong")
    for code, _ in blocks_of_python(_page(lesson))[1:]:
        (tmp_path / "faulty_solution.py").write_text(code)

    result = run(commands)

    assert result.returncode == 1, result.stdout
    assert is_excerpt(shown_after(_page(lesson), commands), result.stdout), result.stdout
