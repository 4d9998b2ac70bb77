"""Every error has a code, and docs/TROUBLESHOOTING.md has one entry for each."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from tests.docs.pages import REPOSITORY
from tests.processes import run_python

ROOMS = ("common", "training", "inference", "loop", "learn", "deployment", "benchmarks")
# An error that is no exception has its code in its line.
IN_A_LINE = re.compile(r" \[([a-z]+(?:-[a-z]+)+)\]")
# The line below an entry's heading.
ENTRY = re.compile(r"^### .+\n\n((?:`[a-z0-9-]+` ?)+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def nodes() -> list[tuple[str, ast.AST]]:
    """All of the code, each node with its file and line."""
    paths = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]
    return [
        (f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}", node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def class_codes(nodes: list[tuple[str, ast.AST]]) -> dict[str, str]:
    """The codes of ``ForeseenError`` and what derives from it, by class; "" if only a raise can say."""
    codes = {"ForeseenError": "", "ModelLoadError": ""}
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    for _ in range(4):  # levels of inheritance
        for one in classes:
            inherited = [codes[base.id] for base in one.bases if isinstance(base, ast.Name) and base.id in codes]
            own = [node.value.value for node in one.body if ast.unparse(node).startswith("code = ")]
            if inherited or one.name in codes:
                codes[one.name] = [*own, *inherited, ""][0]
    return codes


def test_every_error_has_a_code_and_every_code_one_entry(nodes: list[tuple[str, ast.AST]]) -> None:
    defaults = class_codes(nodes)
    codes: dict[str, list[str]] = defaultdict(list)
    without = []
    for place, node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if name in defaults:
                value = next((one.value for one in keywords if one.arg == "code"), ast.Constant(defaults[name]))
                found = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and one.value != "code"]
                if not any(found) and "code" not in ast.unparse(value):  # such as that of another error
                    without.append(place)
                for code in filter(None, found):
                    codes[code].append(place)
            case ast.Constant(value=str(text)):
                for code in IN_A_LINE.findall(text):
                    codes[code].append(place)
    for script in (*REPOSITORY.glob("training/*.sh"), *REPOSITORY.glob("deployment/**/*.sbatch")):
        for code in IN_A_LINE.findall(script.read_text()):
            codes[code].append(str(script))
    page = (REPOSITORY / "docs" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    documented = [code for line in ENTRY.findall(page) for code in re.findall(r"[a-z0-9-]+", line)]

    assert without == []
    assert len(codes) > 80
    assert sorted(documented) == sorted(codes), {code: codes[code] for code in set(codes) - set(documented)}


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("training/train_single.py --epochs 0", "error: --epochs 0: must be at least 1 [flag-value]\n"),
        ("training/evaluate.py gone", "[model-unusable]\n"),
        ("-m inference.predict text --model gone", "[model-unusable]\n"),
        ("-m inference.export gone", "[model-unusable]\n"),
        ("-m learn.cards run gone.yaml", "[pipeline-invalid]\n"),
    ],
)
def test_a_command_prints_the_code_and_exits_with_2(command: str, line: str) -> None:
    done = run_python(command.split())

    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(line)
    assert done.stderr.count("\n") == 1
