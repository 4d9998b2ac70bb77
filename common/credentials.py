"""Tokens and passwords: made fit for a header, and kept out of messages."""

from __future__ import annotations

from common.errors import UserError
from common.escaping import without_user


def header_token(name: str, value: str | None) -> str | None:
    """A token without the blanks and line breaks around it, which a secret made from a file often
    has; None if empty.

    Raises:
        UserError: a header cannot carry it; the message has the name of the variable, and nothing
            of the value.
    """
    # The token goes into a header of HTTP, where a line break would begin another header.
    token = (value or "").strip()
    if not (token.isascii() and token.isprintable()):
        what = "has a line break, another control character or a letter beyond ASCII in it, which "
        what += "no token has"
        raise UserError(f"{name}: {what}; set it again", code="secret-unusable")
    return token or None


def without_password(address: str) -> str:
    """An address for a message: without a user, a password or a signature."""
    return without_user(address).partition("?")[0]
