"""What routes ask of the server that they run in."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from inference.http.server_parts import Parts


def parts_of(request: Request) -> Parts:
    """Return the parts of the server that a request came to."""
    return request.app.state.parts


async def _parts(request: Request) -> Parts:
    return parts_of(request)


PartsDep = Annotated[Parts, Depends(_parts)]
