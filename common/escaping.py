"""Names and texts that come from elsewhere, written so that no terminal and no Markdown renderer
obeys them, and messages without secrets.

This is for what a person reads. Files for programs (JSON, CSV, Parquet) hold names and texts
exactly as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

# They join letters and emoji. Ordinary texts contain them, and they cannot hide anything but
# themselves.
JOINERS = "\u200c\u200d"
_SECRET_NAME = re.compile("(TOKEN|KEY|SECRET|PASSWORD)S?$")
# A variable such as KEY=1 would blank every 1 of a message.
_SHORTEST_SECRET = 8
# S3's secrets may have slashes in them; a number before a slash is a port.
_PASSWORD = re.compile(r"(?<=://)[^\s/?#:@]*:(?!\d+/)[^\s'\"@]*@")
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|!&~$]")


def printable(text: object, keep: str = JOINERS) -> str:
    """For one line in a terminal: invisible characters, except ``keep``, become escapes."""
    return "".join(
        one if one.isprintable() or one in keep else repr(one)[1:-1] for one in str(text)
    )


def in_markdown(text: object) -> str:
    """For a paragraph or a table cell: no HTML, link, image, emphasis or further cell."""
    return _MARKDOWN.sub(r"\\\g<0>", printable(text))


def code_span(text: object) -> str:
    """As code in Markdown, between more backticks than follow each other in the text."""
    shown = printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence} {shown} {fence}" if "`" in shown else f"{fence}{shown}{fence}"


def without_user(address: str) -> str:
    """An address without the user and the password in front of its host."""
    return re.sub(r"(?<=://)[^\s/?#]*@", "", address)


def some_of(names: Sequence[str], shown: Callable[[str], str] = printable, width: int = 120) -> str:
    """Names for one line: all that fit into ``width`` characters, and how many more there are."""
    text = ""
    for index, name in enumerate(names):
        longer = f"{text}, {shown(name)}" if index else shown(name)
        if index and len(longer) > width:
            return f"{text} and {len(names) - index:,} more"
        text = longer
    return text


def without_secrets(text: str) -> str:
    """A message without the passwords of addresses, and the values of environment variables such as
    HF_TOKEN, which libraries quote in theirs.
    """
    text = without_user(_PASSWORD.sub("", text))
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(secret := value.strip()) >= _SHORTEST_SECRET:
            for spelled in (secret, repr(secret)[1:-1]):  # http.client and others quote with repr
                text = text.replace(spelled, f"${name}")
    return text
