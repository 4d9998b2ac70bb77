"""Wrong solutions of all lessons, for each its name, what the checker must say, and the function's body.

A module of ``wrong/`` per lesson has ``HEAD``, the imports of each file; ``SIGNATURES``, the line that begins each
function; and ``WRONG``, by function a text with one entry after another. An entry begins with a comment, its name, and
a second one, what must be said: "words | other words". A body that begins with "def" brings a signature of its own.
Line numbers count from HEAD, with a blank line after it and before the signature.
"""

import importlib
import re
from textwrap import indent

from learn.lessons import LESSONS


def wrong_solutions() -> dict[str, tuple[str, list[str], str]]:
    """By name: the function, what the checker must say, and the whole file."""
    found = {}
    for lesson in LESSONS:
        module = importlib.import_module(f"tests.learn.lessons.wrong.{lesson}")
        for function, listed in module.WRONG.items():
            for entry in re.split(r"\n\n(?=# \w+\n# )", listed.strip()):
                name, says, body = entry.split("\n", 2)
                if not body.startswith("def "):
                    body = f"{module.SIGNATURES[function]}\n{indent(body, '    ')}"
                found[name.removeprefix("# ")] = (
                    function,
                    says.removeprefix("# ").split(" | "),
                    f"{module.HEAD}\n{body}\n",
                )
    return found
