"""The words of every error that the program can print, read from its source."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.source_texts import HOLE, UNKNOWN, Module, Texts, read_modules
from training.config import TrainConfig

ROOMS = ("common", "training", "inference", "learn", "deployment")
_SHELL = re.compile(r'echo "error: (.+)" >&2')
_SHELL_VALUE = re.compile(r"\$\{?\w+\}?")
# What a line on standard error begins with, where it is an error: "error: ", or the command's name.
_SPOKEN = re.compile(r"\w+: ")
_FEWEST_WORDS = 2

Classes = Mapping[str, tuple[Module, ast.ClassDef]]


@dataclass(frozen=True)
class Message:
    """One error as it stands in the source, with `…` for what is known only when it is printed."""

    place: str
    text: str


def of_the_program(repository: Path) -> list[Message]:
    """Read the errors of all Python and shell files of the program."""
    shell = _sources(repository, ".sh") | _sources(repository, ".sbatch")
    return [*_errors(_program(repository)), *in_shell(shell)]


def all_texts(repository: Path) -> Texts:
    """Read every text of the program's Python, errors and all else that it may print."""
    return frozenset(
        text
        for module in _program(repository)
        for node in module.nodes
        if isinstance(node, ast.JoinedStr | ast.Constant)
        for text in module.texts(node)
    )


def flags(repository: Path) -> frozenset[str]:
    """Read every flag of the program's commands, and those that it gives to others."""
    named = (text for text in all_texts(repository) if re.fullmatch(r"--[a-z][\w-]*", text))
    return frozenset([*named, *(f"--{name}" for name in TrainConfig.model_fields)])


def in_shell(sources: Mapping[str, str]) -> list[Message]:
    """Read the errors of shell scripts, each an `echo "error: ..." >&2`."""
    lines = ((place, line) for place, text in sources.items() for line in _SHELL.findall(text))
    return [Message(place, _SHELL_VALUE.sub(HOLE, line)) for place, line in lines]


def in_python(sources: Mapping[str, str]) -> list[Message]:
    """Read the errors of modules, which together are a program.

    An error that has fewer than two words of its own passes on what another one says, or a library: it is left out.
    """
    return _errors(read_modules(sources))


def num_words(text: str) -> int:
    """Count the words of a message that are not filled in."""
    return len(re.findall(r"[A-Za-z]{2,}", text))


@cache
def _program(repository: Path) -> list[Module]:
    return read_modules(_sources(repository, ".py"))


def _sources(repository: Path, suffix: str) -> dict[str, str]:
    files = sorted(file for room in ROOMS for file in (repository / room).rglob(f"*{suffix}"))
    return {file.relative_to(repository).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _errors(modules: Sequence[Module]) -> list[Message]:
    classes = {name: (module, node) for module in modules for name, node in module.classes.items()}
    found = {message for module in modules for message in _messages(module, classes)}
    return sorted((one for one in found if num_words(one.text) >= _FEWEST_WORDS), key=lambda one: one.place)


def _messages(module: Module, classes: Classes) -> Iterator[Message]:
    for node in module.nodes:
        for text in _said_by(node, module, classes):
            yield Message(f"{module.place}:{node.lineno}", re.sub(f"{HOLE}+", HOLE, text))  # type: ignore[attr-defined]


def _said_by(node: ast.AST, module: Module, classes: Classes) -> Texts:
    """What a statement or a call says, where it is an error."""
    match node:
        case ast.Raise(exc=ast.Call() as error):
            return _said_by_error(error, module, classes)
        case ast.Call(func=ast.Name(id=name)) if _is_error(name, classes):
            return _said_by_error(node, module, classes)
        case ast.Call(func=ast.Name(id="print"), args=[line], keywords=[ast.keyword(arg="file"), *_]):
            return frozenset(text for text in module.texts(line) if _SPOKEN.match(text))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="parser"), attr="error"), args=[line]):
            return module.texts(line)
        case ast.Call(func=ast.Name(id="leave"), args=[_, line]):
            return module.texts(line)
        # The server's answers: status, code, line.
        case ast.Tuple(elts=[ast.Constant(value=int(status)), ast.Constant(), line, *_]) if status >= 400:
            return module.texts(line)
        case ast.Call(func=ast.Name(id="error_response"), args=[_, _, _, line, *_]):
            return module.texts(line)
    return frozenset()


def _is_error(name: str, classes: Classes) -> bool:
    if name in classes:
        _, node = classes[name]
        return any(_is_error(ast.unparse(base), classes) for base in node.bases)
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _said_by_error(error: ast.Call, module: Module, classes: Classes) -> Texts:
    """The line of an error: what its class makes of the arguments, or else the first of them that has words."""
    initial = _initial(ast.unparse(error.func), classes)
    if initial is not None:
        home, function, line = initial
        return home.texts(line, _bound(function, error, module, home))
    said = (module.texts(argument) for argument in error.args)
    return next((texts for texts in said if texts != UNKNOWN), UNKNOWN)


def _initial(name: str, classes: Classes) -> tuple[Module, ast.FunctionDef, ast.expr] | None:
    """The nearest `__init__` of a class of the program, and what it hands on as the message."""
    if name not in classes:
        return None
    home, node = classes[name]
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            for call in ast.walk(function):
                match call:
                    case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"))), args=[line, *_]):
                        return home, function, line
    return next((found for base in node.bases if (found := _initial(ast.unparse(base), classes))), None)


def _bound(function: ast.FunctionDef, call: ast.Call, module: Module, home: Module) -> dict[str, Texts]:
    """What the parameters of an `__init__` hold in a call of its class."""
    names = [one.arg for one in function.args.args[1:]]
    defaults = zip(reversed(names), reversed(function.args.defaults), strict=False)
    bound = dict.fromkeys(names, UNKNOWN) | {name: home.texts(value) for name, value in defaults}
    bound |= {name: module.texts(value) for name, value in zip(names, call.args, strict=False)}
    return bound | {one.arg: module.texts(one.value) for one in call.keywords if one.arg}
