"""The training script by hand: ranks that stay equal, one line for each epoch, one line for each mistake."""

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from common.errors import UserError, run_command
from learn.by_hand.cifar10 import ImageData, Split
from learn.by_hand.shapes import SHAPES, draw_shapes
from learn.by_hand.train_cifar10 import evaluate, load_solution, main, one_cycle, train, train_epoch
from tests.processes import here
from training.distributed.ranks import Ranks

RunOnRanks = Callable[..., list[Any]]
Start = Callable[..., "Run"]  # noqa: F821 - the fixture's class, in ../conftest.py
SCRIPT = Path(__file__).resolve().parents[3] / "learn/by_hand/train_cifar10.py"
DATA = ImageData(list(SHAPES), Split(*draw_shapes(71, seed=0)), Split(*draw_shapes(31, seed=1)))
EPOCH = re.compile(r"epoch (\d)/(\d)  loss (\d+\.\d{4})  test accuracy (\d+\.\d\d)%  [\dms. ]+")


def _train() -> tuple[str, list[torch.Tensor]]:
    """What a rank printed, and the weights that it ended with."""
    options = Namespace(epochs=2, batch_size=24, learning_rate=1e-3, seed=3)
    with redirect_stdout(StringIO()) as printed:
        model = train(DATA, options, here())
    return printed.getvalue(), [parameter.detach() for parameter in model.parameters()]


def _command(*flags: str) -> tuple[int, str]:
    """Exit code and complaint of the script with these flags."""
    sys.argv = ["train_cifar10.py", *flags]
    with pytest.raises(SystemExit) as ended, redirect_stderr(StringIO()) as said:
        run_command(main)
    return ended.value.code, said.getvalue()


def test_one_two_and_three_ranks_learn_the_same_and_hold_the_same_weights(run_on_ranks: RunOnRanks) -> None:
    [(said_alone, alone)] = run_on_ranks(1, _train)
    epochs_alone = [EPOCH.fullmatch(line).groups() for line in said_alone.splitlines()]
    assert [epoch[:2] for epoch in epochs_alone] == [("1", "2"), ("2", "2")]
    for world_size in (2, 3):
        (said, first), *others = run_on_ranks(world_size, _train)

        for epoch, line in zip(epochs_alone, said.splitlines(), strict=True):
            loss, accuracy = EPOCH.fullmatch(line).groups()[2:]
            assert float(loss) == pytest.approx(float(epoch[2]), abs=2e-4)
            assert float(accuracy) == pytest.approx(float(epoch[3]), abs=100 / 31 + 0.01)
        for silent, weights in others:
            assert silent == ""
            torch.testing.assert_close(weights, first, rtol=0, atol=0)
        torch.testing.assert_close(first, alone, rtol=0, atol=2e-3)


def test_a_mistake_is_one_line_of_rank_0(run_on_ranks: RunOnRanks) -> None:
    odd, silent = run_on_ranks(2, _command, "--data", "shapes", "--batch_size", "511")
    [unknown] = run_on_ranks(1, _command, "--data", "gone")
    [flag] = run_on_ranks(1, _command, "--learning_rate", "nan")
    [seed] = run_on_ranks(1, _command, "--seed", "99999999999999999999")

    assert odd == (2, "error: --batch_size 511: must be a multiple of the 2 ranks [uneven-split]\n")
    assert silent == (2, "")
    assert unknown[0] == flag[0] == seed[0] == 2
    assert unknown[1].startswith("error: --data gone: no such file or folder; without a network use --data shapes")
    assert flag[1].startswith("error: argument --learning_rate: nan: must be a number above 0")
    assert seed[1].startswith(
        "error: argument --seed: 99999999999999999999: must be a whole number, at least 1 and below"
    )
    assert unknown[1].count("\n") == flag[1].count("\n") == 1


def _command_beside_one_gpu(*flags: str) -> tuple[int, str]:
    with patch("torch.cuda.device_count", lambda: 1):
        return _command(*flags)


@pytest.mark.slow
def test_more_ranks_than_gpus_can_train_on_the_cpu(run_on_ranks: RunOnRanks) -> None:
    flags = ("--device", "cpu", "--data", "shapes", "--batch_size", "511")

    (_, said), _ = run_on_ranks(2, _command_beside_one_gpu, *flags)

    assert said == "error: --batch_size 511: must be a multiple of the 2 ranks [uneven-split]\n"


class _Remembers(nn.Linear):
    """Notes in which mode it is called."""

    def __init__(self) -> None:
        super().__init__(3 * 32 * 32, 10)
        self.modes: list[bool] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.training)
        return super().forward(images.flatten(1))


def _modes() -> list[bool]:
    model, batches = _Remembers(), [(torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64))]
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        train_epoch(model, batches, optimizer, one_cycle(optimizer, 1), here())
        evaluate(model, batches, here().device)
    return model.modes


def test_the_model_is_in_training_mode_for_steps_and_not_for_the_test(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(1, _modes) == [[True, False, True, False]]


def test_a_batch_larger_than_the_data_is_refused() -> None:
    options = Namespace(epochs=1, batch_size=72, learning_rate=1e-3, seed=0)
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"), "gloo")

    with pytest.raises(UserError, match="--batch_size 72: there are only 71 training rows"):
        train(DATA, options, alone)


@pytest.mark.parametrize("steps", [1, 2, 5, 400])
def test_the_learning_rate_rises_for_a_quarter_of_the_steps_and_falls_over_the_others(steps: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule, rates = one_cycle(optimizer, steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    peak = rates.index(max(rates))
    assert peak == max(1, steps // 4) - 1
    assert 1.0 <= max(rates) <= 2.0
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert min(rates) > 0


@pytest.mark.slow
def test_shapes_train_above_nine_in_ten_and_two_ranks_learn_as_one(start: Start) -> None:
    flags = ["--data", "shapes", "--epochs", "3", "--batch_size", "128"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    runs = [start([*command, SCRIPT, *flags], warm=True) for command in ([sys.executable], torchrun)]

    ends = []
    for run in runs:
        assert run.process.returncode == 0, run.err
        lines = run.out.splitlines()
        assert len(lines) == 3
        ends.append(EPOCH.fullmatch(lines[-1]))
    alone, together = ends
    assert float(alone[4]) > 90
    assert float(together[3]) == pytest.approx(float(alone[3]), abs=0.05)
    assert float(together[4]) == pytest.approx(float(alone[4]), abs=1.5)


def _train_with(solution: Path) -> str:
    options = Namespace(epochs=1, batch_size=24, learning_rate=1e-3, seed=3)
    with redirect_stdout(StringIO()) as printed:
        train(DATA, options, here(), load_solution(solution))
    return printed.getvalue()


def test_a_learners_functions_train_in_place_of_the_projects(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    """Functions that do nothing leave each rank with its own model, and say that half of all rows are right."""
    solution = tmp_path / "my_solution.py"
    solution.write_text(
        "def broadcast_parameters(model): pass\n"
        "def average_gradients(model): pass\n"
        "def global_accuracy(correct, total): return 0.5\n"
    )

    first, _ = run_on_ranks(2, _train_with, solution)

    assert EPOCH.fullmatch(first.strip()).group(4) == "50.00"


def test_a_solution_that_lacks_a_function_is_named(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    solution = tmp_path / "my_solution.py"
    solution.write_text("def broadcast_parameters(model): pass\n")

    [(code, said)] = run_on_ranks(1, _command, "--data", "shapes", "--solution", str(solution))

    assert code == 2
    assert said.endswith("my_solution.py: there is no function average_gradients in my_solution.py [exercise-file]\n")


def test_a_solution_that_is_not_written_yet_is_said_in_one_line(run_on_ranks: RunOnRanks) -> None:
    exercise = SCRIPT.parents[1] / "lessons" / "data_parallel.py"

    (code, said), silent = run_on_ranks(2, _command, "--data", "shapes", "--solution", str(exercise))

    assert (code, silent) == (2, (2, ""))
    assert said == f"error: --solution {exercise}: broadcast_parameters is not written yet [exercise-file]\n"
