"""TROUBLESHOOTING.md: every error of the program has one entry, and every line of an entry is one that is printed."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from inference.settings import Settings
from tests.docs import messages
from tests.docs.pages import REPOSITORY
from tests.docs.troubleshooting import INDEX, PAGE, Entry, index, read_entries

TEXT = PAGE.read_text(encoding="utf-8")
ENTRIES = read_entries(TEXT)


def _owners(text: str) -> list[str]:
    """Who has this error: as a whole line, or else words of it."""
    whole = [entry.title for entry in ENTRIES if text in entry.lines]
    return whole or [entry.title for entry in ENTRIES if any(line in text for line in entry.lines)]


@pytest.fixture(scope="module")
def errors() -> list[messages.Message]:
    return messages.of_the_program(REPOSITORY)


def test_every_error_that_the_program_can_print_is_met_by_exactly_one_entry(errors: list[messages.Message]) -> None:
    assert len(errors) > 300
    wrong = {f"{error.place}: {error.text}": owners for error in errors if len(owners := _owners(error.text)) != 1}
    assert not wrong, "\n".join(f"{error} -> {owners or 'no entry'}" for error, owners in wrong.items())


def test_every_line_that_is_not_a_classic_is_one_that_the_program_prints(errors: list[messages.Message]) -> None:
    printed = "\n".join([*(error.text for error in errors), *messages.all_texts(REPOSITORY)])
    assert not [(entry.title, line) for entry in ENTRIES for line in entry.lines if line not in printed]


def test_every_line_has_words_enough_to_be_searched_for() -> None:
    lines = [(entry.title, line) for entry in ENTRIES for line in entry.lines]
    assert len(lines) > 250
    assert not [line for line in lines if messages.num_words(line[1]) < 1]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_an_entry_says_why_and_what_to_do(entry: Entry) -> None:
    assert messages.num_words(entry.cause) >= 10
    assert messages.num_words(entry.advice) >= 10


def test_no_two_entries_have_one_anchor_or_the_same_line() -> None:
    for names in ([entry.anchor for entry in ENTRIES], [line for entry in ENTRIES for line in entry.lines]):
        assert sorted(set(names)) == sorted(names)


def test_the_index_leads_from_the_words_of_each_line_to_its_entry() -> None:
    found = INDEX.search(TEXT)
    assert found
    assert found[0] == index(ENTRIES), "write it with python -m tests.docs.troubleshooting"


def test_the_readme_and_the_operations_page_lead_here() -> None:
    for page in (REPOSITORY / "README.md", PAGE.parent / "OPERATIONS.md"):
        assert "TROUBLESHOOTING.md)" in page.read_text(encoding="utf-8")


def test_advice_names_only_settings_of_the_server_that_exist() -> None:
    served = {name.upper() for name in Settings.model_fields}
    first_words = {name.partition("_")[0] for name in served}
    named = {name for name in re.findall(r"`([A-Z][A-Z_]+)", TEXT) if name.partition("_")[0] in first_words}
    assert {"MAX_TEXT_CHARS", "ENGINE"} <= named <= served


class TestReadingTheSource:
    """What the proof rests on: that no error is overlooked, however it is put together."""

    def _texts(self, source: str) -> set[str]:
        return {message.text for message in messages.in_python({"made_up.py": dedent(source)})}

    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("raise ValueError('the words of it')", "the words of it"),
            ("raise ValueError(f'the {count} words')", "the … words"),
            ("def f(why):\n    line = f'a whole line: {why}'\n    raise OSError(line)", "a whole line: …"),
            ('def f(x):\n    raise OSError(f\'it is {"good" if x else "not good"}\')', "it is not good"),
            ("def f(why):\n    raise OSError(f'it is {why}')\nf('too late')", "it is too late"),
            ("def why():\n    return 'much too late'\nraise OSError(why())", "much too late"),
            ("REMEDY = 'try again'\nraise OSError(f'{path}: {REMEDY}')", "…: try again"),
            ("def made():\n    return KeyError('made, not raised')", "made, not raised"),
            ("print('error: it stops here', file=sys.stderr)", "error: it stops here"),
            ("answer = (503, 'busy', 'come back later')", "come back later"),
        ],
    )
    def test_an_error_is_found_however_its_words_are_put_together(self, source: str, text: str) -> None:
        assert text in self._texts(source)

    def test_an_error_class_that_composes_its_line_is_followed(self) -> None:
        source = """
            class Wrong(Exception):
                def __init__(self, where, what, remedy="do it again"):
                    super().__init__(f"{where}: {what}; {remedy}")
            class Worse(Wrong):
                pass
            raise Worse(path, "is broken")
        """
        assert self._texts(source) == {"…: is broken; do it again"}

    def test_a_line_of_a_shell_script_is_found(self) -> None:
        (found,) = messages.in_shell({"run.sh": 'echo "error: $place: not ${what} here" >&2'})
        assert found.text == "…: not … here"

    def test_an_error_that_the_page_does_not_have_is_seen(self) -> None:
        (error,) = messages.in_python({"made_up.py": "raise ValueError(f'{path}: a wholly new misfortune')"})
        assert _owners(error.text) == []
