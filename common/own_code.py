"""Code of the user's own, named by its import path, ``module:name``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from common.errors import UserError, first_line


def import_by_path(
    path: str, where: str, example: str, folders: Iterable[Path] = ()
) -> Callable[..., Any]:
    """The class or function that an import path names.

    Args:
        path: ``module:name``; the module is looked for among the installed packages, in the working
            directory, and in ``folders``.
        where: begins the error message.
        example: ends it, such as ``my_models:TextCNN``.

    Raises:
        UserError: it cannot be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    # A script that was started by its path finds only what lies beside it. At the end of the path,
    # so that a file there cannot take the place of a package.
    for folder in (Path.cwd(), *folders):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module is the user's own code
        what = f"cannot be imported ({type(error).__name__}: {first_line(error)})"
        remedy = f"give module:name, such as {example}"
        raise UserError(f"{where}: {what}; {remedy}", code="own-code") from error
    if not callable(found):
        raise UserError(f"{where}: is not a class or a function", code="own-code")
    return found
