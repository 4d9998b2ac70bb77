"""A learner's file: read, run as a module, and its functions found."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from common.errors import UserError


class WrongSignature(Exception):
    """The file has no such function, or one with other parameters."""


def compile_solution(path: Path) -> CodeType:
    """Read a solution without running any of it.

    Raises:
        UserError: there is no such file, or it is not valid Python.
    """
    try:
        return compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise UserError(
            f"{path}: {why}; copy the lesson's file in learn/lessons, fill it in and name it here",
            code="exercise-file",
        ) from error
    except SyntaxError as error:
        place = f"{path}, line {error.lineno}" if error.lineno else path
        line = (error.text or "").strip()
        quoted = f": {line}" if line else ""
        raise UserError(f"{place}: {error.msg}{quoted}", code="exercise-file") from error


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Run a solution's file and return one of its functions.

    Raises:
        WrongSignature: the file has no such function, or it has other parameters than the exercise.
    """
    # Imports PyTorch, which a file that cannot be read need not wait for.
    from learn.checking.exercises import EXERCISES

    module = ModuleType("solution")
    module.__file__ = str(path)
    # Dataclasses, pickle and others look a class's module up there.
    sys.modules["solution"] = module
    # So that it can import files beside it, as it could if it were run.
    sys.path.insert(0, str(path.parent))
    # Compiled with its own path, by which a traceback's lines are found to be the learner's.
    exec(compile_solution(path), module.__dict__)
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        raise WrongSignature(f"there is no function {name} in {path.name}")
    # The exercise's own file has the signature: called in the same way, the function must accept
    # it. Its parameters may have other names.
    asked = importlib.import_module(f"learn.lessons.{EXERCISES[name].lesson}")
    expected, found = inspect.signature(getattr(asked, name)), inspect.signature(function)
    try:
        found.bind(*expected.parameters)
    except TypeError:
        theirs, ours = ", ".join(found.parameters), ", ".join(expected.parameters)
        problem = f"it takes ({theirs}), but is called as {name}({ours})"
        raise WrongSignature(problem) from None
    return function
