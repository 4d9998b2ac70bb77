"""The entries of docs/TROUBLESHOOTING.md; `python -m tests.docs.troubleshooting` writes the index of the page."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.docs.pages import REPOSITORY, slug
from tests.docs.source_texts import HOLE

PAGE = REPOSITORY / "docs" / "TROUBLESHOOTING.md"
INDEX = re.compile(r"(?<=<!-- index -->\n).*?(?=<!-- /index -->)", re.DOTALL)
_ENTRY = re.compile(r"^### (.+?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_LINES = re.compile(r"^(<!-- classic -->\n)?```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"--[a-z]\w*")
_MOST_WORDS = 6
_AROUND = " :;,.()"
_SMALL_WORDS = re.compile(r"^((a|an|and|be|has|in|is|it|must|no|not|of|the|to) )+")


@dataclass(frozen=True)
class Entry:
    """One cause, what it makes the program or others print, and what to do.

    ``lines``: words of errors of this program; ``classics``: of PyTorch, the kernel and others.
    """

    title: str
    lines: tuple[str, ...]
    classics: tuple[str, ...]
    cause: str
    advice: str

    @property
    def anchor(self) -> str:
        """Where a link to it leads."""
        return f"#{slug(self.title)}"


def read_entries(page: str) -> list[Entry]:
    """Read all entries of the page."""
    return [_entry(title, body) for title, body in _ENTRY.findall(page)]


def _entry(title: str, body: str) -> Entry:
    blocks = [(bool(mark), text.splitlines()) for mark, text in _LINES.findall(body)]
    cause, _, advice = _LINES.sub("", body).partition("*Do*")
    lines = tuple(line for is_classic, some in blocks for line in some if not is_classic)
    classics = tuple(line for is_classic, some in blocks for line in some if is_classic)
    return Entry(title, lines, classics, cause.strip(), advice.strip(": \n"))


def index(entries: Sequence[Entry]) -> str:
    """The index of the page: each flag, the words of each line, and what has no words."""
    places: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        for key in {first_words(line) for line in (*entry.lines, *entry.classics)}:
            places[key].append(entry)
    flags = [f"- `{key}`: {_titles(places[key])}" for key in sorted(places) if _FLAG.fullmatch(key)]
    words = sorted((key for key in places if not _FLAG.fullmatch(key)), key=_sorted_as)
    letters = [
        _folded(letter, [f"- [`{key}`]({entry.anchor})" for key in keys for entry in places[key]])
        for letter, keys in groupby(words, key=lambda key: _sorted_as(key)[:1])
    ]
    silent = _titles(entry for entry in entries if not entry.lines and not entry.classics)
    parts = (
        ("The line begins with a flag:", *flags),
        ("It has these words (after *a*, *is*, *must be*, *no* and their like):", *letters),
        (f"Nothing is said: {silent}.",),
    )
    return "\n".join(f"{first}\n" + "".join(f"\n{line}" for line in rest) + "\n" * bool(rest) for first, *rest in parts)


def _folded(letter: str, lines: Sequence[str]) -> str:
    """Lines that a click on their letter shows, on GitHub and on the site."""
    opening = f'<details markdown="1"><summary><b>{letter}</b> ({len(lines)})</summary>'
    return "\n".join((opening, "", *lines, "", "</details>"))


def first_words(line: str) -> str:
    """What the index has of a line: the flag that it begins with, or the beginning of its longest piece, or all."""
    if flag := _FLAG.match(line):
        return flag[0]
    words = max(line.split(HOLE), key=len).strip(_AROUND).split()
    return " ".join(words[:_MOST_WORDS]) if len(words) > 1 else line.strip(_AROUND + HOLE)


def _sorted_as(key: str) -> str:
    return re.sub(r"[\W_]", "", _SMALL_WORDS.sub("", key.lower()))


def _titles(entries: Iterable[Entry]) -> str:
    return ", ".join(f"[{entry.title}]({entry.anchor})" for entry in entries)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    written = index(read_entries(text))
    PAGE.write_text(INDEX.sub(lambda _: written, text), encoding="utf-8")
