"""The words of every error that the program can print, read from its source."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOLE = "…"
ROOMS = ("training", "inference", "deployment")
_SHELL = re.compile(r'echo "error: (.+)" >&2')
_SHELL_VALUE = re.compile(r"\$\{?\w+\}?")
# What a line on standard error begins with, where it is an error: "error: ", or the command's name.
_SPOKEN = re.compile(r"\w+: ")
_FEWEST_WORDS = 2

Texts = frozenset[str]
_UNKNOWN = frozenset((HOLE,))


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


def in_shell(sources: Mapping[str, str]) -> list[Message]:
    """Read the errors of shell scripts, each an `echo "error: ..." >&2`."""
    lines = ((place, line) for place, text in sources.items() for line in _SHELL.findall(text))
    return [Message(place, _SHELL_VALUE.sub(HOLE, line)) for place, line in lines]


def in_python(sources: Mapping[str, str]) -> list[Message]:
    """Read the errors of modules, which together are a program.

    An error that has fewer than two words of its own passes on what another one says, or a library: it is left out.
    """
    return _errors(_read(sources))


def _errors(modules: Sequence[_Module]) -> list[Message]:
    classes = {name: (module, node) for module in modules for name, node in module.classes.items()}
    found = {message for module in modules for message in _messages(module, classes)}
    return sorted((one for one in found if num_words(one.text) >= _FEWEST_WORDS), key=lambda one: one.place)


def num_words(text: str) -> int:
    """Count the words of a message that are not filled in."""
    return len(re.findall(r"[A-Za-z]{2,}", text))


def _sources(repository: Path, suffix: str) -> dict[str, str]:
    files = sorted(file for room in ROOMS for file in (repository / room).rglob(f"*{suffix}"))
    return {file.relative_to(repository).as_posix(): file.read_text(encoding="utf-8") for file in files}


@cache
def _program(repository: Path) -> list[_Module]:
    return _read(_sources(repository, ".py"))


def _read(sources: Mapping[str, str]) -> list[_Module]:
    trees = {place: ast.parse(text) for place, text in sources.items()}
    constants = {
        name: value
        for tree in trees.values()
        for node in tree.body
        for name, value in _assigned_by(node)
        if isinstance(value, ast.Constant)
    }
    return [_Module(place, tree, constants) for place, tree in trees.items()]


def _assigned_by(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            yield ast.unparse(target), value
        case ast.NamedExpr(target=target, value=value):
            yield target.id, value


Classes = Mapping[str, tuple["_Module", ast.ClassDef]]


def _messages(module: _Module, classes: Classes) -> Iterator[Message]:
    for node in module.nodes:
        for text in _said_by(node, module, classes):
            yield Message(f"{module.place}:{node.lineno}", re.sub(f"{HOLE}+", HOLE, text))  # type: ignore[attr-defined]


def _said_by(node: ast.AST, module: _Module, classes: Classes) -> Texts:
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


def _said_by_error(error: ast.Call, module: _Module, classes: Classes) -> Texts:
    """The line of an error: what its class makes of the arguments, or else the first of them that has words."""
    initial = _initial(ast.unparse(error.func), classes)
    if initial is not None:
        home, function, line = initial
        return home.texts(line, _bound(function, error, module, home))
    said = (module.texts(argument) for argument in error.args)
    return next((texts for texts in said if texts != _UNKNOWN), _UNKNOWN)


def _initial(name: str, classes: Classes) -> tuple[_Module, ast.FunctionDef, ast.expr] | None:
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


def _bound(function: ast.FunctionDef, call: ast.Call, module: _Module, home: _Module) -> dict[str, Texts]:
    """What the parameters of an `__init__` hold in a call of its class."""
    names = [one.arg for one in function.args.args[1:]]
    defaults = zip(reversed(names), reversed(function.args.defaults), strict=False)
    bound = dict.fromkeys(names, _UNKNOWN) | {name: home.texts(value) for name, value in defaults}
    bound |= {name: module.texts(value) for name, value in zip(names, call.args, strict=False)}
    return bound | {one.arg: module.texts(one.value) for one in call.keywords if one.arg}


class _Module:
    """A module's tree, and the texts that its expressions can be."""

    def __init__(self, place: str, tree: ast.Module, constants: Mapping[str, ast.expr]) -> None:
        self.place = place
        self.tree = tree
        self.nodes = list(ast.walk(tree))
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self._constants = constants
        self._parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._functions = {node.name: node for node in self.nodes if isinstance(node, ast.FunctionDef)}
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        self._values: dict[tuple[ast.AST, str], list[ast.expr]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self._calls[_called(node)].append(node)
            for name, value in _assigned_by(node):
                self._values[tree if name.startswith("self.") else self._scope(node), name].append(value)

    def texts(self, node: ast.expr, bound: Mapping[str, Texts] | None = None, above: Sequence[ast.AST] = ()) -> Texts:
        """All that an expression can be, as far as the source says; `…` for the rest.

        Args:
            node: The expression.
            bound: What parameters hold.
            above: The expressions that this one is part of, so that one that refers to itself comes to an end.
        """
        if node in above:
            return _UNKNOWN
        above = (*above, node)
        match node:
            case ast.Constant(value=str(text)):
                return frozenset((text,))
            case ast.JoinedStr(values=parts):
                return _joined(self.texts(part, bound, above) for part in parts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined(self.texts(part, bound, above) for part in (left, right))
            case ast.FormattedValue(value=value):
                return frozenset(_words_or_hole(text) for text in self.texts(value, bound, above))
            case ast.Name(id=name) if bound and name in bound:
                return bound[name]
        return frozenset().union(*(self.texts(one, bound, above) for one in self._alternatives(node))) or _UNKNOWN

    def _alternatives(self, node: ast.expr) -> Sequence[ast.expr]:
        """The expressions that one may stand for: branches, what was assigned, what a function returns."""
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                return [body, orelse]
            case ast.BoolOp(values=values):
                return values
            case ast.Name(id=name):
                return self._meant_by(name, node)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                return self._returned_by(name)
            case ast.Attribute(value=ast.Name(), attr=name):
                return self._returned_by(name) or self._values.get((self.tree, ast.unparse(node)), [])
        return []

    def _meant_by(self, name: str, node: ast.AST) -> list[ast.expr]:
        """What a name was assigned in the nearest scope, what callers pass for it, or the program's constant."""
        while node is not self.tree:
            node = self._scope(node)
            if values := self._values.get((node, name)):
                return values
            if isinstance(node, ast.FunctionDef) and name in (names := [one.arg for one in node.args.args]):
                place = names.index(name) - (names[0] == "self")
                return [value for call in self._calls[node.name] for value in _passed(call, name, place)]
        return [self._constants[name]] if name in self._constants else []

    def _returned_by(self, name: str) -> list[ast.expr]:
        function = self._functions.get(name)
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)] if function else []
        return [node.value for node in returns if node.value and self._scope(node) is function]

    def _scope(self, node: ast.AST) -> ast.AST:
        while (node := self._parents[node]) is not self.tree and not isinstance(node, ast.FunctionDef):
            pass
        return node


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


def _words_or_hole(text: str) -> str:
    """What is filled in: a piece of the message where it has several words, else a name or another value."""
    return text if not text or " " in text else HOLE


def _passed(call: ast.Call, name: str, place: int) -> list[ast.expr]:
    by_name = [one.value for one in call.keywords if one.arg == name]
    return by_name or call.args[place : place + 1]


def _joined(parts: Iterable[Texts]) -> Texts:
    return frozenset("".join(chosen) for chosen in itertools.product(*parts))
