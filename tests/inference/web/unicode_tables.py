"""The characters that the tokenizers library drops, strips or splits at: python -m tests.inference.web.unicode_tables
prints them as the tables of inference/web/wordpiece.js.

JavaScript's own classes follow the Unicode version of each browser, the library's are fixed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

from tokenizers import normalizers, pre_tokenizers

# Between them are planes without a character; the last two are private, and fonts keep their icons there.
CODES = (*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200), *range(0xF0000, 0x110000))


def tables() -> dict[str, str]:
    def normalizer(**chosen: bool) -> Callable[[str], str]:
        none = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), False)
        return normalizers.BertNormalizer(**none | chosen).normalize_str

    cleaned, stripped = normalizer(clean_text=True), normalizer(strip_accents=True)
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    def is_accent(character: str) -> bool:
        return stripped(f"a{character}") == "a" and unicodedata.normalize("NFD", character) == character

    classes: dict[str, Callable[[str], bool]] = {
        "CONTROL": lambda character: cleaned(f"a{character}b") == "ab",
        "ACCENT": is_accent,
        "PUNCTUATION": lambda character: len(split(f"a{character}b")) == 3,
    }
    return {name: _ranges([code for code in CODES if belongs(chr(code))]) for name, belongs in classes.items()}


def _ranges(codes: Iterable[int]) -> str:
    found: list[list[int]] = []
    for code in codes:
        # Across what is no character a range may go on.
        if found and code == found[-1][1] + 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    # In hexadecimal, the distance from the range before, and how many more follow.
    befores = [0, *(last for _, last in found)]
    return " ".join(
        f"{first - before:x}" + (f"-{last - first:x}" if last > first else "")
        for before, (first, last) in zip(befores, found, strict=False)
    )


if __name__ == "__main__":
    for name, ranges in tables().items():
        print(f"{name} {ranges}")
