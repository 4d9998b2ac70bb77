"""Train a CNN on CIFAR-10, data parallel by hand: torchrun --nproc_per_node=2
learn/by_hand/train_cifar10.py.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if not __package__:  # started by path: the imports below need the folder above training/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DistributedSampler

from common.errors import OneLineParser, UserError, positive, rank0_only_output, run_command
from learn.by_hand import data_parallel
from learn.by_hand.batches import Batch, evaluation_batches, training_batches
from learn.by_hand.cifar10 import ImageData, load_images
from learn.by_hand.cnn import CNN
from learn.checking.exercises import functions_of
from learn.checking.solution import WrongSignature, compile_solution, load_function
from training.distributed.group import join_ranks
from training.distributed.ranks import Ranks
from training.fault_tolerance.interruption import run_rank
from training.monitoring.records import format_time

# Without torchrun there is a group of one rank, so nothing below has to check for a group.
SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main() -> None:
    with rank0_only_output():
        options = _parse()
    if "RANK" not in os.environ:
        os.environ |= SINGLE_RANK
    with join_ranks(options.device) as ranks:
        if options.batch_size % ranks.world_size:
            # All ranks know this, and all must end. One line is enough: only rank 0 prints it.
            wanted = f"must be a multiple of the {ranks.world_size} ranks"
            message = f"--batch_size {options.batch_size}: {wanted}"
            raise UserError(message, quiet=not ranks.is_first, code="uneven-split")
        load = partial(load_images, options.data)
        # From the hub, one rank per machine downloads, and the others find its files. Otherwise
        # all read at once. If one of them fails, all of them end with its error: the others would
        # wait for it forever in the first collective.
        once_per_machine = options.data == "cifar10"
        data = ranks.local_rank0_first(load) if once_per_machine else ranks.run_on_all_ranks(load)
        functions = data_parallel
        if options.solution:
            functions = ranks.run_on_all_ranks(lambda: load_solution(options.solution))
        try:
            train(data, options, ranks, functions)
        except NotImplementedError as error:
            name = traceback.extract_tb(error.__traceback__)[-1].name
            message = f"--solution {options.solution}: {name} is not written yet"
            raise UserError(message, quiet=not ranks.is_first, code="exercise-file") from error


def load_solution(path: Path) -> SimpleNamespace:
    """The three functions of a learner's file.

    Raises:
        UserError: the file cannot be read, or a function is not as the lesson asks for it.
    """
    compile_solution(path)
    try:
        names = functions_of("data_parallel")
        return SimpleNamespace(**{name: load_function(path.resolve(), name) for name in names})
    except WrongSignature as error:
        raise UserError(f"--solution {path}: {error}", code="exercise-file") from error


def train(
    data: ImageData,
    options: Namespace,
    ranks: Ranks,
    functions: Any = data_parallel,
) -> nn.Module:
    """Train with the three ``functions``; rank 0 prints one line per epoch. Returns the model."""
    steps = len(data.train) // options.batch_size
    if not steps:
        problem = f"there are only {len(data.train):,} training rows"
        message = f"--batch_size {options.batch_size}: {problem}"
        raise UserError(message, quiet=not ranks.is_first, code="rows-too-few")
    # The batch size is that of all ranks together, so on more ranks each has fewer rows, and the
    # steps, and with them the learning rate that fits, stay the same.
    rows_per_rank = options.batch_size // ranks.world_size
    # Every rank draws its own weights, as separate programs do: the broadcast makes them equal.
    torch.manual_seed(options.seed + ranks.rank)
    model = CNN(len(data.classes)).to(ranks.device)
    functions.broadcast_parameters(model)
    # Each rank has an optimizer of its own. They are never compared or sent: equal weights and
    # equal gradients make equal moments.
    optimizer = AdamW(model.parameters(), options.learning_rate)
    schedule = one_cycle(optimizer, options.epochs * steps)
    # One seed on all ranks: they must agree on the order of the rows, of which each takes a part.
    train_sampler = DistributedSampler(data.train, ranks.world_size, ranks.rank, seed=options.seed)
    test_sampler = DistributedSampler(data.test, ranks.world_size, ranks.rank, shuffle=False)
    for epoch in range(1, options.epochs + 1):
        began = time.perf_counter()
        # Without it every epoch would have the order of the first.
        train_sampler.set_epoch(epoch)
        batches = training_batches(data.train, train_sampler, rows_per_rank, options.seed)
        loss = train_epoch(model, batches, optimizer, schedule, ranks, functions)
        test_batches = evaluation_batches(data.test, test_sampler, rows_per_rank)
        accuracy = evaluate(model, test_batches, ranks.device, functions)
        # Both numbers are made by collectives, so all ranks computed them; only rank 0 prints.
        if ranks.is_first:
            took = format_time(time.perf_counter() - began)
            found = f"loss {loss:.4f}  test accuracy {accuracy:.2%}"
            print(f"epoch {epoch}/{options.epochs}  {found}  {took}", flush=True)
    return model


def train_epoch(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: Optimizer,
    schedule: LRScheduler,
    ranks: Ranks,
    functions: Any = data_parallel,
) -> float:
    """One step per batch; returns the mean loss of the global batches."""
    model.train()
    losses = []
    for images, labels in batches:
        # images: (rows per rank, 3, 32, 32), labels: (rows per rank,). The loss is the mean over
        # this rank's rows only.
        loss = F.cross_entropy(model(images.to(ranks.device)), labels.to(ranks.device))
        optimizer.zero_grad()
        loss.backward()
        # The only communication of a step. After backward(), which computes what is averaged, and
        # before step(), which on every rank must use the same gradients.
        functions.average_gradients(model)
        optimizer.step()
        schedule.step()
        # A tensor, not a number: .item() would wait for the GPU in every step.
        losses.append(loss.detach())
    # All ranks have the same number of rows in each step, so the mean of their means is the mean
    # over all rows. One collective per epoch, because the loss is only for printing.
    return ranks.sum_(torch.stack(losses).mean()).item() / ranks.world_size


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    functions: Any = data_parallel,
) -> float:
    """The accuracy over all ranks' test rows."""
    model.eval()
    correct = total = 0
    # No collective in this loop: the ranks may have different numbers of rows and of batches.
    for images, labels in batches:
        correct += int((model(images.to(device)).argmax(dim=1) == labels.to(device)).sum())
        total += len(labels)
    return functions.global_accuracy(correct, total)


def one_cycle(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The learning rate rises over a quarter of the steps and falls to nothing over the others.

    Source: Smith and Topin, "Super-Convergence", arXiv 1708.07120, section 3.
    """
    peak = max(1, steps // 4)

    # A factor of the peak's learning rate: whichever of the rising and the falling line is lower.
    def factor(step: int) -> float:
        return min((step + 1) / peak, (steps - step) / (steps - peak + 1))

    return LambdaLR(optimizer, factor)


def _parse() -> Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    sources = "cifar10 (the hub; default), shapes, or a folder or .tar.gz"
    add("--data", default="cifar10", help=sources)
    yours = "use your three functions, from your copy of the lesson's file"
    add("--solution", type=Path, help=yours)
    add("--epochs", type=positive, default=8, help="default: 8")
    rows = "rows of a step over all ranks (default: 512)"
    add("--batch_size", type=positive, default=512, help=rows)
    add("--learning_rate", type=_rate, default=3e-3, help="at its peak (default: 3e-3)")
    add("--seed", type=_seed, default=1, help="default: 1")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    return parser.parse_args()


def _rate(text: str) -> float:
    with suppress(ValueError):
        if 0 < (rate := float(text)) < math.inf:
            return rate
    raise ArgumentTypeError(f"{text}: must be a number above 0")


def _seed(text: str) -> int:
    if (seed := positive(text)) >= 2**32:
        raise ArgumentTypeError(f"{text}: must be a whole number, at least 1 and below {2**32:,}")
    return seed


if __name__ == "__main__":
    run_rank(lambda: run_command(main))
