"""Habits of language that a native reader stumbles over, and walls of text. CONTRIBUTING.md asks for plain English."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.docs.pages import REPOSITORY

PATTERNS = ("*.md", "docs/*.md", "docs/lessons/*.md", "checkpoints/**/*.md", "common/**/*.md", "deployment/**/*.md")
PAGES = sorted(str(path.relative_to(REPOSITORY)) for pattern in PATTERNS for path in REPOSITORY.glob(pattern))
LONGEST_PARAGRAPH, LONGEST_ITEM = 90, 60  # words

_COUNTED = (
    r"(?:bytes?|rows?|steps?|tokens?|texts?|seconds|samples?|lines?|requests?|calls?|stages?|GPUs?|threads?|cores?|all-reduces?"
    r"|operations?|processe?s?|ranks?|pods?|spans?|dollars|files?|times|ms|s|MB|GiB|GB|MiB|%)"
)
_UNIT = (
    r"(?:step|rank|second|minute|hour|day|epoch|row|token|text|block|device|GPU|machine|node|process|parameter|request"
    r"|line|layer|panel|pod|checkpoint)"
)


@dataclass(frozen=True)
class Habit:
    """What is written, what to write instead, and an example of each."""

    pattern: str
    instead: str
    bad: str
    good: str


HABITS = (
    Habit(r"\bfor ever\b", "forever", "It would wait for ever.", "It would wait forever."),
    Habit(r"\bper cent\b", "%", "5 per cent of the rows.", "5% of the rows."),
    Habit(
        r"\b(?:hyper-parameter|speed-up)s?\b",
        "hyperparameter, speedup",
        "A speed-up of 2.",
        "A speedup of 2.",
    ),
    Habit(
        r"\b(?:token|initial|normal)is(?:e[sd]?|ing|ation)\b",
        "-ize",
        "Texts are tokenised once.",
        "Texts are tokenized once.",
    ),
    Habit(
        r"\bafterwards you can\b",
        "you'll be able to",
        "Afterwards you can explain DDP.",
        "You'll be able to explain DDP.",
    ),
    Habit(r"\b(?:anew|afresh)\b", "again, from scratch", "The run starts anew.", "The run starts from scratch."),
    Habit(r"\bwhoever\b", "anyone who, the person who", "For whoever is called.", "For the person on call."),
    Habit(r"\bmend(?:s|ed|ing)?\b", "fix", "Mend the storage.", "Fix the storage."),
    Habit(r"\blet(?:s|ting)? go of\b", "free", "Weights are let go of.", "Weights are freed."),
    Habit(
        r"\b(?:goes|go|went|gone|going) on\b",
        "resume, continue",
        "It goes on from the newest checkpoint.",
        "It resumes from the newest checkpoint.",
    ),
    Habit(r"\b(?:speaks?|spoken?)\b", "communicate, use", "Ranks that speak most.", "Ranks that communicate most."),
    Habit(
        r"\bstands?\b(?! for\b)(?!-)",
        "is, are; is shown; is complete",
        "The reason stands in the log.",
        "The reason is in the log.",
    ),
    Habit(
        r"\b(?:lies?|lay) (?:in|on|at|beside|behind|outside|between|over|there|farthest)\b",
        "is, are",
        "The image lies in a registry.",
        "The image is in a registry.",
    ),
    Habit(rf"\b{_COUNTED} an? {_UNIT}\b", "per", "It sends 16 bytes a parameter.", "It sends 16 bytes per parameter."),
    Habit(r"\beach \d+\b", "every", "Each 20 steps.", "Every 20 steps."),
    Habit(
        r"(?:^|[.:;] )Where (?![^.]*\?)[^.\n]*,",
        "if, when",
        "Where the loss is not finite, the step is skipped.",
        "If the loss is not finite, the step is skipped.",
    ),
    Habit(
        r"\b(?:only|except|even|but|exact) where\b|\bwhere there (?:is|are) (?:no|one|a|any)\b",
        "if, when",
        "It runs only where torchao is installed.",
        "It runs only if torchao is installed.",
    ),
    Habit(
        r"(?<!left )(?<!leave )(?<!stand)(?<!-)\balone\b",
        "only, on its own",
        "The question is time alone.",
        "The only question is time.",
    ),
    Habit(
        r"(?<!times )(?<!half )(?<!twice )\bas many\b(?!(?: [\w.-]+){0,3} as\b)",
        "the same number",
        "All ranks have as many.",
        "All ranks have the same number.",
    ),
    Habit(r"\bas much again\b", "1.5 times, twice", "It sends half as much again.", "It sends 1.5 times as much."),
    Habit(r"\bput(?:s|ting)? out\b", "roll out, publish", "Put out a model.", "Roll out a model."),
    Habit(
        r"\b(?:shared|shares|deals?|dealt) out\b",
        "sharded, divided among",
        "State is shared out over the ranks.",
        "State is sharded over the ranks.",
    ),
    Habit(
        r"\bheld to\b(?! be\b)",
        "compared with, checked against",
        "Weights are held to those of one process.",
        "Weights are compared with those of one process.",
    ),
    Habit(r"\bat hand\b", "available", "No cluster was at hand.", "No cluster was available."),
    Habit(r"\bwill do\b(?! so)", "is enough", "Slow links will do.", "Slow links are enough."),
    Habit(r"\bgets? through\b", "process", "The tokens that it gets through.", "The tokens that it processes."),
    Habit(r"\bendure[sd]?\b", "survive", "What can be endured.", "What the run survives."),
    Habit(r"\ball the same\b", "anyway", "Put the link back all the same.", "Put the link back anyway."),
    Habit(
        r", for (?:then|nothing|it|they|there|no|all)\b",
        "because",
        "Exit code 2, for then nothing is known.",
        "Exit code 2, because nothing is known then.",
    ),
)


def prose(text: str) -> str:
    """The text of a page without blocks, code, addresses, comments, front matter and what a command has written."""
    text = re.sub(r"\A---\n.*?^---$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "`x`", text, flags=re.DOTALL)
    return re.sub(r"\]\([^()\s]*\)", "]", text)


def paragraphs(text: str) -> list[str]:
    """The paragraphs, list items and rows of tables, each on one line."""
    joined = re.sub(r"\n(?!\s*\n|\s*(?:[-*|#]|\d+\.)\s?)", " ", prose(text))
    return [line.strip() for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.instead)
def test_a_habit_is_found_where_it_is_and_not_in_the_better_sentence(habit: Habit) -> None:
    assert re.search(habit.pattern, habit.bad, re.IGNORECASE)
    assert not any(re.search(other.pattern, habit.good, re.IGNORECASE) for other in HABITS)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_none_of_the_habits(page: str) -> None:
    found = [
        f'"{match[0].strip()}": write {habit.instead}, in: {line[max(0, match.start() - 60) : match.end() + 40]}'
        for line in paragraphs((REPOSITORY / page).read_text(encoding="utf-8"))
        for habit in HABITS
        for match in re.finditer(habit.pattern, line, re.IGNORECASE)
    ]

    assert found == [], "\n".join([page, *found])


@pytest.mark.parametrize("page", PAGES)
def test_no_paragraph_is_a_wall(page: str) -> None:
    walls = []
    for line in paragraphs((REPOSITORY / page).read_text(encoding="utf-8")):
        most = LONGEST_ITEM if re.match(r"(?:[-*]|\d+\.) ", line) else LONGEST_PARAGRAPH
        if (words := len(line.split())) > most and not line.startswith("|"):
            walls.append(f"{words} words, more than {most}: {line[:70]}")

    assert walls == [], "\n".join([page, *walls])
