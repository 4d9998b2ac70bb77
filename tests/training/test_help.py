"""What every command says when it is asked for help, or is given a flag in another spelling."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import OneLineParser
from inference.export import _parse_arguments
from training.config import OTHER_NAMES, TrainConfig
from training.planning.__main__ import ask, build_parser

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("-m", "training.planning"),
    ("-m", "training.watch"),
    ("-m", "inference.export"),
    ("-m", "inference.predict"),
    ("-m", "inference.serve"),
    ("-m", "training.publish_model"),
    ("deployment/build_image.py",),
    ("deployment/publish_space.py",),
    ("deployment/write_sbom.py",),
)


def _printed(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={"COLUMNS": "80", "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_help_fits_a_terminal_of_80_columns(command: tuple[str, ...]) -> None:
    printed = _printed(*command, "--help")

    assert printed.startswith("usage:")
    assert [line for line in printed.splitlines() if len(line) > 80] == []


def test_the_help_of_training_shows_no_empty_default() -> None:
    printed = _printed("training/train_single.py", "--help")

    assert [line for line in printed.splitlines() if len(line) > 80] == []
    assert "default: )" not in printed


def test_the_example_in_the_planners_help_can_be_run() -> None:
    command = build_parser().description.rpartition("python -m training.planning ")[2].split()

    assert ask(command).plans


@pytest.mark.parametrize("package", ["training", "inference"])
def test_a_package_that_is_run_lists_its_commands(package: str) -> None:
    lines = _printed("-m", package).splitlines()

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
    assert not OTHER_NAMES.keys() & TrainConfig.model_fields.keys()


@pytest.mark.parametrize(
    "command",
    [
        ("training/train_single.py", "--help"),
        ("training/train_ddp.py", "--epochs", "three"),
        ("-m", "training.evaluate", "--help"),
        ("-m", "inference.serve", "--help"),
        ("-m", "inference.export", "--help"),
        ("-m", "inference.predict", "--help"),
        ("-m", "learn.cards", "run", "--help"),
        ("-m", "learn.check", "--help"),
    ],
    ids=" ".join,
)
def test_flags_are_checked_before_pytorch_is_imported(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('PyTorch is imported')")

    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
    )

    assert "PyTorch" not in done.stderr
    assert (done.stdout + done.stderr).startswith(("usage:", "error: --epochs three: must be"))
