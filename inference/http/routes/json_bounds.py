"""Limits what a JSON body may hold while it still arrives: as objects, JSON can take a hundred
times its bytes.
"""

from __future__ import annotations

from inference.errors import RefusedTextError
from inference.settings import Settings

# Whatever the settings, a body this small holds neither too many values nor too long a string.
SMALL_BODY_BYTES = 1024
# Bytes besides its strings; enough for indented JSON.
_BYTES_PER_VALUE = 64


class JsonBounds:
    """Counts the values of one body and measures its strings without creating any; takes the body
    piece by piece.

    It finds strings as a parser does: they begin and end at quotes that are not escaped. Text that
    is not JSON may be misread, but only after the first error, where a parser stops.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._num_values = 0.0
        self._string_bytes = 0  # of the string that the pieces so far end in
        self._is_in_string = False
        self._half_escape = b""

    def feed(self, piece: bytes) -> None:
        """Look at the next piece.

        Raises:
            RefusedTextError: there are more values than any request needs, or a string is longer
                than any text.
        """
        most = 2 * self._settings.max_body_values
        # Remove escapes first, pair by pair from the left; then every quote that is left begins or
        # ends a string.
        piece = (self._half_escape + piece).replace(b"\\\\", b"__")
        self._half_escape = b"\\" if piece.endswith(b"\\") else b""
        piece = piece.removesuffix(b"\\").replace(b'\\"', b"__")
        parts = piece.split(b'"', most)
        strings = parts[0 if self._is_in_string else 1 :: 2]
        between = b"".join(parts[1 if self._is_in_string else 0 :: 2])
        # A value is the first one inside a bracket, or follows a comma or a colon. Long numbers and
        # white space cost time too.
        self._num_values += (
            len(between) - len(between.translate(None, b",:[{")) + len(between) / _BYTES_PER_VALUE
        )
        if self._num_values > self._settings.max_body_values or len(parts) > most:
            raise RefusedTextError(
                "too_many_values",
                f"the body has more JSON values than the maximum of {self._settings.max_body_values}; "
                "send fewer texts in one request",
            )
        self._measure(strings, ends_in_string=self._is_in_string ^ (len(parts) % 2 == 0))

    def _measure(self, strings: list[bytes], *, ends_in_string: bool) -> None:
        lengths = [len(string) for string in strings]
        if self._is_in_string:
            lengths[0] += self._string_bytes
        if max(lengths, default=0) > self._settings.max_line_bytes:
            raise RefusedTextError(
                "text_too_long",
                f"the body has a string of more than {self._settings.max_line_bytes} bytes, longer than "
                f"any text of {self._settings.max_text_chars} characters; shorten it",
            )
        self._string_bytes = lengths[-1] if ends_in_string else 0
        self._is_in_string = ends_in_string
