"""What the texts in a program's source can be when it runs, as far as the source says."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

HOLE = "…"
UNKNOWN = frozenset((HOLE,))
Texts = frozenset[str]


def read_modules(sources: Mapping[str, str]) -> list[Module]:
    """Read modules, which together are a program: a constant of one may be used in another.

    Args:
        sources: by place, such as ``training/config.py``.
    """
    trees = {place: ast.parse(text) for place, text in sources.items()}
    constants = {
        name: value
        for tree in trees.values()
        for node in tree.body
        for name, value in _assigned_by(node)
        if isinstance(value, ast.Constant)
    }
    return [Module(place, tree, constants) for place, tree in trees.items()]


class Module:
    """A module's tree, and the texts that its expressions can be."""

    def __init__(self, place: str, tree: ast.Module, constants: Mapping[str, ast.expr]) -> None:
        self.place = place
        self.tree = tree
        self.nodes: list[ast.AST] = [tree]
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in self.nodes:  # which grows meanwhile
            children = list(ast.iter_child_nodes(node))
            self._parents |= dict.fromkeys(children, node)
            self.nodes += children
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self._constants = constants
        self._functions = {node.name: node for node in self.nodes if isinstance(node, ast.FunctionDef)}
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        self._values: dict[tuple[ast.AST, str], list[ast.expr]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self._calls[_called(node)].append(node)
            for name, value in _assigned_by(node):
                self._values[tree if name.startswith("self.") else self._scope(node), name].append(value)

    def texts(self, node: ast.expr, bound: Mapping[str, Texts] | None = None, above: Sequence[ast.AST] = ()) -> Texts:
        """All that an expression can be; `…` for what is known only when the program runs.

        Args:
            node: the expression.
            bound: what parameters hold.
            above: the expressions that this one is part of, so that one that refers to itself comes to an end.
        """
        if node in above:
            return UNKNOWN
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
        return frozenset().union(*(self.texts(one, bound, above) for one in self._alternatives(node))) or UNKNOWN

    def _alternatives(self, node: ast.expr) -> Sequence[ast.expr]:
        """The expressions that one may stand for: branches, what was assigned, what a function returns."""
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                return [body, orelse]
            case ast.BoolOp(values=values):
                return values
            case ast.Name(id=name):
                return self._meant_by(name, node)
            case ast.Call() if name := _called(node):
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


def _assigned_by(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            yield ast.unparse(target), value
        case ast.NamedExpr(target=target, value=value):
            yield target.id, value


def _called(call: ast.Call) -> str:
    """The name of the function or of the own method that is called; none for what belongs to something else."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


def _passed(call: ast.Call, name: str, place: int) -> list[ast.expr]:
    by_name = [one.value for one in call.keywords if one.arg == name]
    return by_name or call.args[place : place + 1]


def _words_or_hole(text: str) -> str:
    """What is filled in: a piece of the message where it has several words, else a name or another value."""
    return text if not text or " " in text else HOLE


def _joined(parts: Iterable[Texts]) -> Texts:
    return frozenset("".join(chosen) for chosen in itertools.product(*parts))
