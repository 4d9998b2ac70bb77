"""The rooms of the house, held by the imports between them; those for type hints alone count as much."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "common": {"common"},
    "training": {"training", "common"},
    "inference": {"inference", "common"},
    "loop": {"loop", "inference", "common"},  # of inference only what follows from its stream, as a test below holds
    "learn": {"learn", "training", "common"},
    "deployment": {"deployment", "training", "inference", "common"},
    "benchmarks": {"benchmarks", "deployment", "learn", "loop", "training", "inference", "common"},
}
ENTRY_POINTS = {
    *("training.train_ddp", "training.train_single", "training.evaluate", "training.watch", "training.launch"),
    *("training.publish_model", "inference.app", "inference.serve", "inference.predict", "inference.export"),
    "inference.score",
    "inference.fetch",
    "inference.cascade",
    *("learn.check", "loop.promote", "loop.retrain", "loop.review", "loop.verdict"),
}


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module_name(path): path for room in MAY_IMPORT for path in (REPOSITORY / room).rglob("*.py")}


def _package(name: str) -> str:
    """The package of training that a module is in; a module beside the packages, such as config, is one of its own."""
    return ".".join(name.split(".")[:2]) if name.startswith("training.") else name.split(".")[0]


def _imports(path: Path) -> set[str]:
    """The project's own modules that a file imports, be it within a function or for type hints."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & MODULES.keys()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """What each module imports."""
    return {name: _imports(path) - {name} for name, path in MODULES.items()}


def test_the_graph_has_the_modules_that_users_start(graph: dict[str, set[str]]) -> None:
    assert graph.keys() >= ENTRY_POINTS
    assert "training.run.start" in graph["training.train_ddp"]
    assert "training.run.trainer" in graph["training.run.start"]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(graph: dict[str, set[str]], room: str) -> None:
    strangers = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if name.split(".")[0] == room and other.split(".")[0] not in MAY_IMPORT[room]
        if not (room == "loop" and other.startswith("inference.observing"))
    }

    assert not strangers


def test_the_loop_knows_of_the_server_only_what_it_has_observed(graph: dict[str, set[str]]) -> None:
    used = {other for name, others in graph.items() if name.startswith("loop") for other in others}

    assert {name for name in used if name.startswith("inference")} <= {
        name for name in MODULES if name.startswith("inference.observing")
    }


def _check_one_direction(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_imports_run_in_a_circle(graph: dict[str, set[str]]) -> None:
    _check_one_direction(graph)


def test_the_packages_of_training_import_only_downwards(graph: dict[str, set[str]]) -> None:
    """Two packages that import each other are one, however many folders they have. On top of all is `training.run`."""
    packages = defaultdict(set)
    for name, others in graph.items():
        package = _package(name)
        packages[package] |= {_package(other) for other in others} - {package}

    _check_one_direction(packages)
    importers = {one for one, others in packages.items() if "training.run" in others and one.startswith("training.")}
    assert not {one for one in importers if (REPOSITORY / one.replace(".", "/") / "__init__.py").exists()}


def test_nothing_imports_an_entry_point(graph: dict[str, set[str]]) -> None:
    # Those who deploy and measure the product do start it: an application in Ray's replica, a server to time.
    starts = ("deployment.", "benchmarks.")
    inside = {name: others for name, others in graph.items() if not name.startswith(starts)}

    assert not {(name, other) for name, others in inside.items() for other in others & ENTRY_POINTS}


def test_what_training_and_serving_share_needs_no_pytorch() -> None:
    shared = sorted(name for name in MODULES if name.startswith("common"))
    program = f"import sys, {', '.join(shared)}; assert 'torch' not in sys.modules"

    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
