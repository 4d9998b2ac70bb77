"""The path of a request without the prefix that a proxy serves it below."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from starlette.routing import Route


def route_path(scope: MutableMapping[str, Any]) -> str:
    """The path as the routes name it; uvicorn puts the prefix (`--root-path`) before every path."""
    path, prefix = scope["path"], scope.get("root_path", "")
    if not prefix:
        return path
    rest = path.removeprefix(prefix.rstrip("/"))
    return ("/" + rest.lstrip("/")) if rest[:1] in ("", "/") else path


def remove_second_prefix(scope: MutableMapping[str, Any], routes: Iterable[Route]) -> None:
    """Where a proxy leaves the prefix in the path, uvicorn puts it there again."""
    path, prefix = route_path(scope), scope["root_path"].rstrip("/") + "/"
    if path.startswith(prefix) and not any(route.path_regex.match(path) for route in routes):
        scope["path"] = path


def is_change(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request asks for more than a page, so that it needs a key where there is one."""
    method = scope["method"]
    is_on_models = method in ("PUT", "DELETE") and route_path(scope).startswith("/models/")
    return method == "POST" or is_on_models
