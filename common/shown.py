"""Text from outside (labels, names, texts, messages of libraries) made fit for where a person reads it."""

from __future__ import annotations

import os
import re

# Control characters, line and paragraph separators, surrogates, and what reverses the order of the text around it.
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET_NAME = re.compile("(TOKEN|KEY|SECRET|PASSWORD)S?$")
_SHORTEST_SECRET = 8


def printable(text: object) -> str:
    r"""Text as a terminal can show it: in one line, and an escape character as ``\x1b`` instead of what it does."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), str(text))


def without_secrets(text: str) -> str:
    """A message without the values of environment variables such as HF_TOKEN, which libraries quote in theirs."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(secret := value.strip()) >= _SHORTEST_SECRET:
            for spelled in (secret, repr(secret)[1:-1]):  # http.client and others quote with repr
                text = text.replace(spelled, f"${name}")
    return text
