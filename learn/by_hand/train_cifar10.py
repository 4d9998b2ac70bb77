"""Train a CNN on CIFAR-10, data parallel by hand: torchrun --nproc_per_node=2 learn/by_hand/train_cifar10.py."""

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
from training.fault_tolerance.interruption import run_rank
from training.monitoring.records import format_time
from training.parallelism.distributed import Ranks, join_ranks

# Without torchrun there is a group of one rank, so nothing below has to check for a group.
SINGLE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main() -> None:
    with rank0_only_output():
        options = _parse()
    if "RANK" not in os.environ:
        os.environ |= SINGLE_RANK
    with join_ranks(options.device) as ranks:
        if options.batch_size % ranks.world_size:
            message = f"--batch_size {options.batch_size}: must be a multiple of the {ranks.world_size} ranks"
            raise UserError(message, quiet=not ranks.is_first, code="uneven-split")
        load = partial(load_images, options.data)
        data = ranks.local_rank0_first(load) if options.data == "cifar10" else ranks.run_on_all_ranks(load)
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


def train(data: ImageData, options: Namespace, ranks: Ranks, functions: Any = data_parallel) -> nn.Module:
    """Train with the three ``functions``; rank 0 prints one line per epoch. Returns the model."""
    steps = len(data.train) // options.batch_size
    if not steps:
        message = f"--batch_size {options.batch_size}: there are only {len(data.train):,} training rows"
        raise UserError(message, quiet=not ranks.is_first, code="rows-too-few")
    rows_per_rank = options.batch_size // ranks.world_size
    # Every rank draws its own weights, as separate programs do: the broadcast makes them equal.
    torch.manual_seed(options.seed + ranks.rank)
    model = CNN(len(data.classes)).to(ranks.device)
    functions.broadcast_parameters(model)
    optimizer = AdamW(model.parameters(), options.learning_rate)
    schedule = one_cycle(optimizer, options.epochs * steps)
    train_sampler = DistributedSampler(data.train, ranks.world_size, ranks.rank, seed=options.seed)
    test_sampler = DistributedSampler(data.test, ranks.world_size, ranks.rank, shuffle=False)
    for epoch in range(1, options.epochs + 1):
        began = time.perf_counter()
        train_sampler.set_epoch(epoch)
        batches = training_batches(data.train, train_sampler, rows_per_rank, options.seed)
        loss = train_epoch(model, batches, optimizer, schedule, ranks, functions)
        test_batches = evaluation_batches(data.test, test_sampler, rows_per_rank)
        accuracy = evaluate(model, test_batches, ranks.device, functions)
        if ranks.is_first:
            took = format_time(time.perf_counter() - began)
            print(f"epoch {epoch}/{options.epochs}  loss {loss:.4f}  test accuracy {accuracy:.2%}  {took}", flush=True)
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
        loss = F.cross_entropy(model(images.to(ranks.device)), labels.to(ranks.device))
        optimizer.zero_grad()
        loss.backward()
        functions.average_gradients(model)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return ranks.sum_(torch.stack(losses).mean()).item() / ranks.world_size


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device, functions: Any = data_parallel) -> float:
    """The accuracy over all ranks' test rows."""
    model.eval()
    correct = total = 0
    for images, labels in batches:
        correct += int((model(images.to(device)).argmax(dim=1) == labels.to(device)).sum())
        total += len(labels)
    return functions.global_accuracy(correct, total)


def one_cycle(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The learning rate rises over the first quarter of the steps and falls to nothing over the others.

    Source: Smith and Topin, "Super-Convergence", arXiv 1708.07120, section 3.
    """
    peak = max(1, steps // 4)
    return LambdaLR(optimizer, lambda step: min((step + 1) / peak, (steps - step) / (steps - peak + 1)))


def _parse() -> Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--data", default="cifar10", help="cifar10 (the hub; default), shapes, or a folder or .tar.gz")
    parser.add_argument("--solution", type=Path, help="use your three functions, from your copy of the lesson's file")
    parser.add_argument("--epochs", type=positive, default=8, help="default: 8")
    parser.add_argument("--batch_size", type=positive, default=512, help="rows of a step over all ranks (default: 512)")
    parser.add_argument("--learning_rate", type=_rate, default=3e-3, help="at its peak (default: 3e-3)")
    parser.add_argument("--seed", type=_seed, default=1, help="default: 1")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
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
