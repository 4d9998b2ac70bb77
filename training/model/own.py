"""A network, a loss or a metric of the user's own, given as an object or by its import path,
``module:name``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from common.errors import UserError, first_line
from common.own_code import import_by_path
from training.config import TrainConfig
from training.facts import TASK_FACTS
from training.tasks import Task

# From the size of the vocabulary and the number of scores per text to a module that takes ids and
# mask, int64 (rows, seq), and returns the scores, (rows, scores).
MakeNetwork = Callable[[int, int], nn.Module]
# From scores, fp32 (rows, scores), and targets, (rows, ...), to the loss of each row, (rows,).
RowLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# From the scores and targets of all rows of an evaluation to figures by name; the larger, the
# better.
Metric = Callable[[np.ndarray, np.ndarray], Mapping[str, float]]


@dataclass(frozen=True)
class Own:
    """What is the user's own; None for what is not."""

    network: MakeNetwork | None = None
    loss: RowLoss | None = None
    metric: Metric | None = None

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        network: MakeNetwork | None = None,
        loss: RowLoss | None = None,
        metric: Metric | None = None,
    ) -> Own:
        """What was given as an argument, otherwise what the configuration names.

        Raises:
            UserError: an import path leads nowhere, or a flag does not work with code of one's own.
        """
        _check_flags(
            config,
            has_network=bool(network or config.network),
            has_loss=bool(loss or config.loss),
        )
        return cls(
            network or _load("network", config.network),
            loss or _load("loss", config.loss),
            metric or _load("metric", config.metric),
        )

    def apply_to(self, task: Task, targets: np.ndarray, best_metric: str) -> None:
        """Let the task use the user's loss and metric, after trying both on the ``targets`` of a
        few rows.

        Raises:
            UserError: one of them fails, or returns something else than it should, or no figure is
            ``best_metric``.
        """
        scores = np.zeros((len(targets), len(task.label_names)), dtype=np.float32)
        if self.loss:
            with _as_user_error("loss"):
                losses = self.loss(torch.from_numpy(scores), torch.from_numpy(targets))
            if not isinstance(losses, torch.Tensor) or losses.shape != (len(targets),):
                shape = getattr(losses, "shape", type(losses).__name__)
                raise UserError(
                    "--loss: must return the loss of each row, a tensor of shape "
                    f"({len(targets)},) for {len(targets)} "
                    f"rows; got {shape}",
                    code="own-code",
                )
            task.own_loss = self.loss
        if self.metric:
            # A metric is only asked after an epoch. Tried here, a mistake in it costs nothing.
            with _as_user_error("metric"):
                figures = dict(self.metric(scores, targets))
            numbers = int | float | np.number
            if wrong := [name for name, one in figures.items() if not isinstance(one, numbers)]:
                raise UserError(
                    f"--metric: {wrong[0]!r} must be a number, got {figures[wrong[0]]!r}",
                    code="own-code",
                )
            if best_metric not in (known := [*TASK_FACTS[task.name].metrics, *figures]):
                raise UserError(
                    f"--best_metric {best_metric}: there is {', '.join(known)}; name one of these",
                    code="flag-value",
                )
            task.own_metric = self.metric


def _check_flags(config: TrainConfig, *, has_network: bool, has_loss: bool) -> None:
    """Here and not among the conflicts of flags, because a network or a loss may be an argument
    instead of a flag.
    """
    flags = why = ""
    if has_network and config.layers:
        flags = f"--network and --layers {config.layers}"
        why = "it only knows the blocks of encoders of transformers"
    if has_network and config.export:
        flags, why = (
            "--network and --export",
            "the server runs no network that a model folder names",
        )
    if has_loss and config.distill:
        flags = f"--loss and --distill {config.distill}"
        why = "your own loss does not get the teacher's answers"
    if flags:
        raise UserError(f"{flags}: {why}; drop one", code="flags-conflict")


@contextmanager
def _as_user_error(flag: str) -> Iterator[None]:
    """Turns any error of the user's code into one line."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"--{flag}: failed on a few rows ({type(error).__name__}: {first_line(error)})",
            code="own-code",
        ) from error


NOTHING_OWN = Own()


def _load(flag: str, path: str) -> Any:
    return import_by_path(path, f"--{flag} {path}", "my_models:TextCNN") if path else None
