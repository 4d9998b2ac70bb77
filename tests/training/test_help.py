"""What every command says when it is asked for help, or is given a flag in another spelling."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from common.errors import OneLineParser
from inference.export import _parse_arguments
from training.config import TrainConfig, parse_config
from training.other_names import NOT_FLAGS, OTHER_NAMES, OTHER_VALUES
from training.planning.__main__ import ask, build_parser

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("training/train_single.py",),
    ("-m", "training.train_single", "--help=all"),
    ("-m", "training.evaluate"),
    ("-m", "training.data_report"),
    ("-m", "training.planning"),
    ("-m", "training.watch"),
    ("-m", "training.search"),
    ("-m", "training.publish_model"),
    ("-m", "inference.export"),
    ("-m", "inference.cascade"),
    ("-m", "inference.predict"),
    ("-m", "inference.serve"),
    ("-m", "learn.cards", "run"),
    ("-m", "learn.check"),
    ("deployment/build_image.py",),
    ("deployment/publish_space.py",),
    ("deployment/write_sbom.py",),
)


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"COLUMNS": "80", "PATH": "", **environment}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which PyTorch cannot be imported: nobody waits seconds for help or for a wrong flag."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch.py").write_text("raise RuntimeError('PyTorch is imported')")
    return str(folder)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_comes_at_once_and_fits_a_terminal_of_80_columns(command: tuple[str, ...], without_torch: str) -> None:
    done = _run(*command, "--help", PYTHONPATH=without_torch)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "default: )" not in done.stdout


def test_flags_are_checked_before_pytorch_is_imported(without_torch: str) -> None:
    done = _run("training/train_ddp.py", "--epochs", "three", PYTHONPATH=without_torch)

    assert done.stderr.startswith("error: --epochs three: must be")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("training/train_ddp.py", "--dataset", "/no/rows.csv"), "--dataset /no/rows.csv: no such file or folder"),
        (("training/train_single.py", "--dataset", "/no/rows.csv"), "--dataset /no/rows.csv: no such file or folder"),
        (("-m", "training.evaluate", "/no/model"), "/no/model: no such model; train one"),
        (("-m", "learn.check", "ring", "/no/solution.py"), "/no/solution.py: cannot be read (No such file"),
    ],
    ids=" ".join,
)
def test_a_path_that_is_not_there_is_reported_before_pytorch_is_imported(
    command: tuple[str, ...], problem: str, without_torch: str
) -> None:
    done = _run(*command, PYTHONPATH=without_torch)

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {problem}")


def test_the_examples_in_the_help_of_training_are_right(without_torch: str) -> None:
    examples = _run("training/train_ddp.py", "--help", PYTHONPATH=without_torch).stdout.partition("examples:")[2]

    commands = re.findall(r"training/run_ddp\.sh 2 (.*)", examples)
    assert len(commands) == 3
    for flags in commands:
        parse_config(shlex.split(flags), {})


def test_the_example_in_the_planners_help_can_be_run() -> None:
    plan, largest = re.findall(r"python -m training\.planning (.*)", build_parser().description)

    assert ask(plan.split()).plans
    assert build_parser().parse_args(largest.split()).largest
    # The help wraps each paragraph.
    assert [part.count("python -m") for part in build_parser().description.split("\n\n")] == [0, 1, 1]


@pytest.mark.parametrize("package", ["training", "inference"])
def test_a_package_that_is_run_lists_its_commands(package: str) -> None:
    lines = _run("-m", package).stdout.splitlines()

    assert lines
    for line in lines:
        command = line.split("  ")[0]
        if "-m " in command:
            module = command.partition("-m ")[2].split()[0]
            assert importlib.util.find_spec(module), line
        else:
            assert (ROOT / command.removeprefix("python ").split()[0]).is_file(), line


def test_flags_take_underscores_or_dashes_in_every_command() -> None:
    parser = OneLineParser()
    parser.add_argument("--batch_tokens", type=int)
    parser.add_argument("--dry-run", action="store_true")

    assert parser.parse_args(["--batch-tokens", "3", "--dry_run"]) == parser.parse_args(
        ["--batch_tokens=3", "--dry-run"]
    )
    assert _parse_arguments(["model", "--max-drop", "1"]).max_drop == 1


def test_the_names_of_other_trainers_point_at_flags_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= TrainConfig.model_fields.keys()
    assert not (OTHER_NAMES.keys() | NOT_FLAGS.keys()) & TrainConfig.model_fields.keys()
    for name, values in OTHER_VALUES.items():
        assert set(values.values()) <= set(get_args(TrainConfig.model_fields[name].annotation))
